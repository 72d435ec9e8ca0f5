//! Reads the items of a source file of this crate, formatted by rustfmt, with their documentation.

use std::collections::BTreeMap;

/// A name with its value and meaning.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) value: String,
    meaning: String,
}

/// A member of a structure.
#[derive(Debug, Clone)]
pub(crate) struct Field {
    name: String,
    kind: String,
    meaning: String,
    offset: usize,
    pub(crate) size: usize,
}

/// An item.
#[derive(Debug, Clone)]
pub(crate) enum Item {
    /// Constants of a file or module.
    Constants(Vec<Row>),
    /// An enumeration.
    Numbers(Vec<Row>),
    /// Bits of a word.
    Bits(Vec<Row>),
    /// Names in order, from 0.
    List(Vec<Row>),
    /// A layout in memory.
    Structure(Vec<Field>),
}

/// The context of a line.
#[derive(Debug, Clone, PartialEq)]
enum Place {
    File,
    Module(String),
    Numbers(String),
    Bits(String),
    Structure(String),
    List,
    /// Code that is no part of the interface.
    Code,
}

/// The items of a file, by name; the constants outside of modules have an empty name.
pub(crate) fn parse(text: &str) -> BTreeMap<String, Item> {
    let mut items = BTreeMap::new();
    let mut places = vec![Place::File];
    let mut docs = String::new();
    let mut is_layout = false;
    for line in text.lines() {
        let line = line.trim();
        if line.starts_with("#[cfg(") && line.contains("test") {
            break;
        }
        if let Some(doc) = line.strip_prefix("///") {
            docs = format!("{docs} {}", doc.trim());
            continue;
        }
        is_layout |= line.starts_with("#[repr(C");
        if line.starts_with("#[") || line.starts_with("//") {
            continue;
        }
        let place = places.last().expect("the file").clone();
        entry(&mut items, &place, line, &plain(&docs));
        if line.starts_with('}') && line.ends_with('{') {
            // `} else {`
        } else if line.ends_with('{') {
            places.push(opened(&place, line, std::mem::take(&mut is_layout), &mut items));
        } else if line.starts_with('}') && places.len() > 1 {
            places.pop();
        }
        docs.clear();
    }
    items
}

/// The place that a line which ends with a brace opens.
fn opened(place: &Place, line: &str, is_layout: bool, items: &mut BTreeMap<String, Item>) -> Place {
    let head = line.trim_end_matches('{').trim();
    let words: Vec<&str> = head.split_whitespace().collect();
    match (place, &words[..]) {
        (Place::File, ["numbered!" | "named!" | "bitflags!" | "layouts!"]) => Place::File,
        (Place::File, ["counters!"]) => {
            items.insert("Counter".to_owned(), Item::List(Vec::new()));
            Place::List
        }
        (Place::File, ["pub", "mod", name]) => Place::Module((*name).to_owned()),
        (Place::File, ["pub", "struct", name, _repr]) if name.ends_with(':') => {
            let name = name.trim_end_matches(':').to_owned();
            items.insert(name.clone(), Item::Bits(Vec::new()));
            Place::Bits(name)
        }
        (Place::File, ["pub", "struct", name]) if is_layout => structure(name, items),
        (Place::File, [name, _repr]) if name.ends_with(':') => numbers(name.trim_end_matches(':'), items),
        (Place::File, [name]) if name.chars().all(char::is_alphanumeric) && !name.is_empty() => {
            structure(name, items)
        }
        _ => Place::Code,
    }
}

fn numbers(name: &str, items: &mut BTreeMap<String, Item>) -> Place {
    items.insert(name.to_owned(), Item::Numbers(Vec::new()));
    Place::Numbers(name.to_owned())
}

fn structure(name: &str, items: &mut BTreeMap<String, Item>) -> Place {
    items.insert(name.to_owned(), Item::Structure(Vec::new()));
    Place::Structure(name.to_owned())
}

/// Adds the entry in a line to the items.
fn entry(items: &mut BTreeMap<String, Item>, place: &Place, line: &str, meaning: &str) {
    let row = |name: &str, value: &str| Row {
        name: name.trim().to_owned(),
        value: value.trim().trim_end_matches([',', ';']).to_owned(),
        meaning: meaning.to_owned(),
    };
    match place {
        Place::File | Place::Module(_) => {
            let Some((name, value)) = line
                .strip_prefix("pub const ")
                .and_then(|rest| rest.split_once(" = "))
            else {
                // An empty structure opens and closes on its line.
                if let (Place::File, Some(name)) = (place, line.strip_suffix(" {}")) {
                    items.insert(name.to_owned(), Item::Structure(Vec::new()));
                }
                return;
            };
            let name = name.split(':').next().unwrap_or(name);
            let key = match place {
                Place::Module(module) => module.clone(),
                _ => String::new(),
            };
            if let Item::Constants(rows) = items.entry(key).or_insert_with(|| Item::Constants(Vec::new())) {
                rows.push(row(name, value));
            }
        }
        Place::Numbers(key) | Place::Bits(key) => {
            let line = line.strip_prefix("const ").unwrap_or(line);
            if let (Some(Item::Numbers(rows) | Item::Bits(rows)), Some((name, value))) =
                (items.get_mut(key), line.split_once(" = "))
            {
                // The name in verbs follows the number.
                let number = value.split(" => ").next().unwrap_or(value);
                rows.push(row(name, number));
            }
        }
        Place::List => {
            if let (Some(Item::List(rows)), Some((_, text))) =
                (items.get_mut("Counter"), line.split_once(" = "))
            {
                let index = rows.len().to_string();
                rows.push(row(text.trim_end_matches(',').trim_matches('"'), &index));
            }
        }
        Place::Structure(key) => {
            if let (Some(Item::Structure(fields)), Some((name, kind))) =
                (items.get_mut(key), line.split_once(": "))
            {
                let name = name.strip_prefix("pub ").unwrap_or(name);
                let is_reserved = name.contains("reserved");
                fields.push(Field {
                    name: if is_reserved {
                        "–".to_owned()
                    } else {
                        name.to_owned()
                    },
                    kind: kind.trim_end_matches(',').to_owned(),
                    meaning: if is_reserved {
                        "reserved, 0".to_owned()
                    } else {
                        meaning.to_owned()
                    },
                    offset: 0,
                    size: 0,
                });
            }
        }
        Place::Code => {}
    }
}

/// Documentation without rustdoc's links and paths.
fn plain(docs: &str) -> String {
    let mut text = String::new();
    let mut rest = docs.trim();
    while let Some((before, after)) = rest.split_once("[`") {
        text.push_str(before);
        let Some((name, behind)) = after.split_once("`]") else {
            text.push_str("[`");
            rest = after;
            continue;
        };
        let name = name.rsplit("::").next().unwrap_or(name);
        text.push_str(&format!("`{name}`"));
        rest = behind;
        if rest.starts_with('(')
            && let Some((_, behind)) = rest.split_once(')')
        {
            rest = behind;
        }
    }
    text.push_str(rest);
    // The remaining links lead to chapters.
    while let Some((before, after)) = text.split_once('[') {
        let Some((name, behind)) = after.split_once("](") else {
            break;
        };
        let Some((_, behind)) = behind.split_once(')') else {
            break;
        };
        text = format!("{before}{name}{behind}");
    }
    text.replace('|', "\\|")
}

/// Length of a type in bytes; `None` if it contains a type whose size is not known yet.
fn size(kind: &str, known: &BTreeMap<String, usize>) -> Option<usize> {
    if let Some((inner, count)) = kind
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']')?.split_once("; "))
    {
        let count = match count {
            "PAYLOAD_LEN" => urnic_device::command::PAYLOAD_LEN,
            "RESULT_LEN" => urnic_device::command::RESULT_LEN,
            digits => digits.parse().expect("a number"),
        };
        return Some(size(inner, known)? * count);
    }
    match kind {
        "u8" => Some(1),
        "U16" => Some(2),
        "U32" | "u32" | "AtomicU32" => Some(4),
        "U64" => Some(8),
        other => known.get(other).copied(),
    }
}

/// The sizes of all structures.
pub(crate) fn sizes(structures: &BTreeMap<String, Vec<Field>>) -> BTreeMap<String, usize> {
    let mut known = BTreeMap::new();
    while known.len() < structures.len() {
        let before = known.len();
        for (name, fields) in structures {
            let sum: Option<usize> = fields.iter().map(|field| size(&field.kind, &known)).sum();
            known.extend(sum.map(|sum| (name.clone(), sum)));
        }
        assert!(
            known.len() > before,
            "a structure has a member of an unknown type: {:?}",
            known.keys()
        );
    }
    known
}

/// Fills in offsets and sizes. The structures have no padding.
pub(crate) fn place(fields: &mut [Field], known: &BTreeMap<String, usize>) {
    let mut offset = 0;
    for field in fields {
        field.offset = offset;
        field.size = size(&field.kind, known).expect("all sizes are known");
        offset += field.size;
    }
}

impl Item {
    /// The item as a table.
    pub(crate) fn table(&self) -> String {
        let rows = |head: &str, rows: &[Row], line: fn(&Row) -> String| {
            let columns = head.matches('|').count() - 1;
            let rule = "|---".repeat(columns);
            let lines: String = rows.iter().map(|row| format!("{}\n", line(row))).collect();
            format!("{head}\n{rule}|\n{lines}")
        };
        match self {
            Item::Constants(list) => rows("| name | value | |", list, |row| {
                format!("| `{}` | `{}` | {} |", row.name, row.value, row.meaning)
            }),
            Item::Numbers(list) => rows("| number | name | meaning |", list, |row| {
                format!("| {} | `{}` | {} |", row.value, row.name, row.meaning)
            }),
            Item::Bits(list) => rows("| bits | name | meaning |", list, |row| {
                format!("| `{}` | `{}` | {} |", row.value, row.name, row.meaning)
            }),
            Item::List(list) => rows("| index | name | meaning |", list, |row| {
                format!("| {} | `{}` | {} |", row.value, row.name, row.meaning)
            }),
            Item::Structure(fields) => {
                let lines: String = fields
                    .iter()
                    .map(|field| {
                        format!(
                            "| {:#04x} | {} | `{}` | {} |\n",
                            field.offset, field.size, field.name, field.meaning
                        )
                    })
                    .collect();
                let total: usize = fields.iter().map(|field| field.size).sum();
                match total {
                    0 => "(no bytes)\n".to_owned(),
                    _ => format!(
                        "| offset | bytes | field | meaning |\n|---|---|---|---|\n{lines}\n{total} bytes.\n"
                    ),
                }
            }
        }
    }
}
