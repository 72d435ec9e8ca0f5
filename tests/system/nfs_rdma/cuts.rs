//! The connection breaks: after each byte of a READ's and a WRITE's, and of the bytes before them.

use urnic_sync::Mutex;

use urnic_tests::forwarder::{Cut, Forwarder};
use urnic_tests::wait::{TIME_LIMIT, descriptors, resident, until};

use super::{Export, idle, pattern, read, write};

/// Bytes of each READ and WRITE.
const BLOCK: usize = 100_000;
/// More bytes than a connection carries from its start until a READ or WRITE is complete.
const END: u64 = 110_000;
/// Bytes before the READ or WRITE: the start of the connection, NULL, LOOKUP, CREATE.
const START: u64 = 2_000;
/// The number of bytes that every second connection carries, so that the transfer makes progress.
const ON: u64 = 350_000;

/// Copies a file there and back, block by block, through connections that break after these numbers
/// of bytes.
#[track_caller]
fn transfers_survive(name: &str, points: &[u64]) {
    let export = Export::new(name, &[]);
    let pid = export.server.pid();
    write(&export.here("sent"), b"one");
    let transfer = |command: &str, forwarder: &Forwarder| {
        let program = export.client_through(command, &forwarder.port.to_string());
        program.line("--depth 1 --block").arg(BLOCK.to_string())
    };
    let cut_at = |points: &[u64]| {
        let mut points: std::collections::VecDeque<u64> = points.iter().copied().collect();
        let mut number = 0_usize;
        Forwarder::new(export.rdma.parse().expect("a port"), move || {
            number += 1;
            let reset = number % 4 < 2;
            let after = if number % 2 == 1 { points.pop_front()? } else { ON };
            Some(Cut { after, reset })
        })
    };
    // This run creates what is created once, and opens the files that the server keeps open.
    let whole = cut_at(&[]);
    for name in ["file", "again"] {
        let there = format!("127.0.0.1:/{name}");
        transfer("put", &whole)
            .arg(export.here("sent"))
            .arg(&there)
            .run()
            .success();
        transfer("get", &whole)
            .arg(&there)
            .arg(export.here("got"))
            .run()
            .success();
    }
    drop(whole);
    let before = idle(pid);

    // Each point takes no more than this many blocks, so every point is used before the file ends.
    let bytes = pattern(BLOCK * 4 * (points.len() + 1));
    write(&export.here("sent"), &bytes);
    let patience = TIME_LIMIT + std::time::Duration::from_secs(points.len() as u64);
    let mut memory = None;
    for (command, from, to) in [
        (
            "put",
            export.here("sent").display().to_string(),
            "127.0.0.1:/file".to_owned(),
        ),
        (
            "get",
            "127.0.0.1:/file".to_owned(),
            export.here("got").display().to_string(),
        ),
    ] {
        let forwarder = cut_at(points);
        let moved = transfer(command, &forwarder).arg(from).arg(to);
        moved.run_for(patience).success();
        assert!(
            forwarder.cuts() >= 2 * points.len(),
            "{command}: {} cuts",
            forwarder.cuts()
        );
        let back = until(TIME_LIMIT, || (descriptors(pid) <= before).then_some(()));
        assert!(
            back.is_some(),
            "{command}: {} descriptors, {before} before",
            descriptors(pid)
        );
        memory.get_or_insert_with(|| resident(pid));
    }
    assert!(read(&export.file("file")) == bytes, "what was put");
    assert!(read(&export.here("got")) == bytes, "what was got");
    // The descriptors and memory after all cuts of READs, and after a second run of WRITEs: no more
    // than allocators keep.
    let forwarder = cut_at(points);
    let again = transfer("put", &forwarder)
        .arg(export.here("sent"))
        .arg("127.0.0.1:/again");
    again.run_for(patience).success();
    let grown = resident(pid).saturating_sub(memory.unwrap_or_default());
    assert!(grown < 32 * 1024, "{grown} KiB more");
}

#[test]
fn a_transfer_survives_its_connections_breaks() {
    let mut points = vec![0, 7, 40, 64, 66, 100, 137, 200, 333, 700, 1100];
    points.extend((START..END).step_by(9_973));
    transfers_survive("cuts", &points);
}

#[test]
#[ignore = "make soak"]
fn a_transfer_survives_breaks_at_every_point() {
    // Each byte of the start, where all differ; then each that is the first of another word of a
    // segment, sooner or later.
    let points: Vec<u64> = (0..START).chain((START..END).step_by(53)).collect();
    let parts = Mutex::new(points.chunks(250).enumerate());
    let next = || parts.lock().next();
    // Most of the time passes between one connection and the next.
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while let Some((part, points)) = next() {
                    transfers_survive(&format!("part-{part}"), points);
                }
            });
        }
    });
}
