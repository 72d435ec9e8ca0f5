//! Checks that `docs/reference/device.md` agrees with this crate: its tables are made from `src/`,
//! and none is missing.
//!
//! A table is between `<!-- FILE::ITEM -->` and `<!-- end -->`. `URNIC_BLESS=1 cargo test -p
//! urnic-device --test datasheet` rewrites the tables; without it a difference is a failure.

mod source;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use source::Item;
use urnic_device::{command, cqe, event, record, stream, wqe};

/// The files that the datasheet describes, in the order of its chapters.
const FILES: [&str; 11] = [
    "lib",
    "registers",
    "doorbell",
    "command",
    "command/bits",
    "event",
    "record",
    "wqe",
    "cqe",
    "stream",
    "counter",
];

fn tree() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All items, by the names of their blocks.
fn items() -> BTreeMap<String, Item> {
    let mut all = BTreeMap::new();
    for file in FILES.into_iter().chain(["vocabulary"]) {
        let path = tree().join(format!("verbs-api/device/src/{file}.rs"));
        let text = std::fs::read_to_string(&path).expect("a source file of this crate");
        let short = file.rsplit('/').next().expect("a name").replace("lib", "device");
        for (name, item) in source::parse(&text) {
            let key = if name.is_empty() {
                short.clone()
            } else {
                format!("{short}::{name}")
            };
            assert!(all.insert(key.clone(), item).is_none(), "{key} is there twice");
        }
    }
    let sizes = all.iter().filter_map(|(key, item)| match item {
        Item::Structure(fields) => Some((key.rsplit("::").next()?.to_owned(), fields.clone())),
        _ => None,
    });
    let sizes = source::sizes(&sizes.collect());
    for item in all.values_mut() {
        if let Item::Structure(fields) = item {
            source::place(fields, &sizes);
        }
    }
    all
}

#[test]
fn the_datasheet_has_every_item_as_the_code_has_it() {
    let path = tree().join("docs/reference/device.md");
    let old = std::fs::read_to_string(&path).expect("docs/reference/device.md");
    let items = items();
    let mut new = String::new();
    let mut seen = Vec::new();
    let mut lines = old.lines();
    while let Some(line) = lines.next() {
        new.push_str(line);
        new.push('\n');
        let block = line
            .strip_prefix("<!-- ")
            .and_then(|rest| rest.strip_suffix(" -->"));
        let Some(key) = block.filter(|key| *key != "end") else {
            continue;
        };
        let item = items
            .get(key)
            .unwrap_or_else(|| panic!("docs/reference/device.md has a block for {key}, the code nothing"));
        assert!(
            !seen.contains(&key),
            "docs/reference/device.md has two blocks for {key}"
        );
        seen.push(key);
        new.push_str(&item.table());
        new.push_str("<!-- end -->\n");
        assert!(
            lines.any(|line| line == "<!-- end -->"),
            "the block for {key} has no end"
        );
    }
    for key in items.keys() {
        assert!(
            seen.contains(&key.as_str()),
            "docs/reference/device.md lacks a block for {key}"
        );
    }
    if std::env::var_os("URNIC_BLESS").is_some() {
        std::fs::write(&path, &new).expect("docs/reference/device.md is writable");
    } else {
        let differs = old.lines().zip(new.lines()).find(|(old, new)| old != new);
        assert!(
            old == new,
            "docs/reference/device.md is not up to date ({differs:?}): see the head of verbs-api/device/tests/datasheet/main.rs"
        );
    }
}

macro_rules! sizes {
    ($($module:ident: $($name:ident)*;)*) => {
        BTreeMap::from([$($((concat!(stringify!($module), "::", stringify!($name)), size_of::<$module::$name>()),)*)*])
    };
}

/// The layouts in the datasheet are those of the compiler.
#[test]
fn structures_are_as_long_as_the_compiler_makes_them() {
    let compiled = sizes! {
        command: Command Completion Nothing Handle Count QueueHandle CreateEq CreateMr ModifyMr CreateMw CreateCq ResizeCq ModerateCq
            CreateSrq ModifySrq CreateQp ModifyQp QpStatus DeviceAttributes;
        event: Event;
        record: QueueRecord CqRecord;
        wqe: SendHeader Sge DatagramAddress AtomicOperands BindOperands RecvHeader;
        cqe: Cqe;
        stream: Endpoint Address Connect Listen Listening Endpoints Close BindDatagrams DatagramPort Multicast Path Retries Attach
            Receive;
    };
    let read: BTreeMap<String, usize> = items()
        .into_iter()
        .filter_map(|(key, item)| match item {
            Item::Structure(fields) => Some((key, fields.iter().map(|field| field.size).sum())),
            _ => None,
        })
        .collect();
    let compiled = compiled
        .into_iter()
        .map(|(key, size)| (key.to_owned(), size))
        .collect();
    assert_eq!(read, compiled);
}

/// The numbers in the datasheet are those of the compiler.
#[test]
fn numbers_are_those_of_the_compiler() {
    use urnic_device::doorbell::Kind;
    use urnic_device::vocabulary::{QpKind, QpState, WcOpcode, WcStatus};
    type Name = fn(u32) -> Option<String>;
    let names: [(&str, Name); 10] = [
        ("command::Opcode", |n| {
            command::Opcode::from_raw(n as u16).map(|v| format!("{v:?}"))
        }),
        ("command::Status", |n| {
            command::Status::from_raw(n as u16).map(|v| format!("{v:?}"))
        }),
        ("doorbell::Kind", |n| {
            Kind::from_raw(n as u8).map(|v| format!("{v:?}"))
        }),
        ("event::EventKind", |n| {
            event::EventKind::from_raw(n as u8).map(|v| format!("{v:?}"))
        }),
        ("event::QpFault", |n| {
            event::QpFault::from_raw(n as u16).map(|v| format!("{v:?}"))
        }),
        ("wqe::Opcode", |n| {
            wqe::Opcode::from_raw(n as u8).map(|v| format!("{v:?}"))
        }),
        ("vocabulary::QpKind", |n| {
            QpKind::from_raw(n).map(|v| format!("{v:?}"))
        }),
        ("vocabulary::QpState", |n| {
            QpState::from_raw(n).map(|v| format!("{v:?}"))
        }),
        ("vocabulary::WcStatus", |n| {
            WcStatus::from_raw(n as u8).map(|v| format!("{v:?}"))
        }),
        ("vocabulary::WcOpcode", |n| {
            WcOpcode::from_raw(n as u8).map(|v| format!("{v:?}"))
        }),
    ];
    let items = items();
    for (key, name) in names {
        let Some(Item::Numbers(rows)) = items.get(key) else {
            panic!("{key} is no enumeration");
        };
        let read: Vec<(u32, String)> = rows
            .iter()
            .map(|row| (row.value.parse().expect("a number"), row.name.clone()))
            .collect();
        let known: Vec<(u32, String)> = (0..256).filter_map(|n| Some((n, name(n)?))).collect();
        assert_eq!(read, known, "{key}");
    }
}
