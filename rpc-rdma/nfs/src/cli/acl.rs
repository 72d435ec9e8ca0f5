//! `urnic-nfs acl`: access control lists as text, one line for each entry, in the form of `getfacl
//! -cnE` and `setfacl --set-file`.

use super::remote::{Remote, Way};
use super::{Done, print};
use clap::Args;
use std::fmt::Write as _;
use std::path::PathBuf;
use urnic_nfs::acl::{Acl, EXECUTE, Entry, MAX_ENTRIES, READ, Rights, Tag, WRITE};
use urnic_nfs::nfsacl::{ACCESS, DEFAULT, List, Lists};

/// Arguments of `acl`.
#[derive(Args, Debug)]
pub(crate) struct Show {
    /// SERVER:PATH
    remote: Remote,
    /// Set the lists in this text file
    #[arg(long, value_name = "FILE")]
    set: Option<PathBuf>,
    /// Remove a directory's default list
    #[arg(long)]
    remove_default: bool,
    #[command(flatten)]
    way: Way,
}

/// The prefix of entries of default lists.
const OF_DEFAULT: &str = "default:";

/// The letters of rights.
const LETTERS: [(Rights, char); 3] = [(READ, 'r'), (WRITE, 'w'), (EXECUTE, 'x')];

impl Show {
    pub(crate) fn run(&self) -> Done<()> {
        let failed = |error: urnic_nfs::client::Error| self.remote.failed(&error);
        let new = match &self.set {
            None => None,
            Some(file) => {
                let text = std::fs::read_to_string(file).map_err(|error| error.to_string());
                let lists = text.and_then(|text| lists(&text));
                Some(lists.map_err(|error| format!("{}: {error}", file.display()))?)
            }
        };
        let mut place = self.remote.reach(&self.way)?;
        let (file, _) = place.file().map_err(failed)?;
        let mut got = place.client.acls(file, ACCESS | DEFAULT).map_err(failed)?;
        if new.is_some() || self.remove_default {
            // Linux's server removes a list that is not in the call.
            let new = new.unwrap_or_default();
            if new.mask & ACCESS != 0 {
                got.access = new.access;
            }
            if new.mask & DEFAULT != 0 || self.remove_default {
                got.default = new.default;
            }
            return place.client.set_acls(file, got).map_err(failed);
        }
        // Removes the mask, which a list on the wire always has.
        let got = got.change().map_err(|error| self.remote.failed(&error))?;
        let both = [("", got.access.flatten()), (OF_DEFAULT, got.default.flatten())];
        let text = both
            .iter()
            .filter_map(|(of, list)| Some(text(of, list.as_ref()?)));
        print(&text.collect::<String>())
    }
}

fn text(of: &str, list: &Acl) -> String {
    let mut text = String::new();
    for Entry { tag, id, rights } in list.entries(0) {
        let (tag, named) = tag_name(tag);
        let id = if named { id.to_string() } else { String::new() };
        let rights = LETTERS.map(|(right, letter)| if rights & right == 0 { '-' } else { letter });
        let [r, w, x] = rights;
        let _ = writeln!(text, "{of}{tag}:{id}:{r}{w}{x}");
    }
    text
}

/// The name of a tag, and whether its entries have an id.
const fn tag_name(tag: Tag) -> (&'static str, bool) {
    match tag {
        Tag::Owner => ("user", false),
        Tag::User => ("user", true),
        Tag::OwningGroup => ("group", false),
        Tag::Group => ("group", true),
        Tag::Mask => ("mask", false),
        Tag::Other => ("other", false),
    }
}

fn lists(text: &str) -> Done<Lists> {
    let (mut access, mut default) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        match line.strip_prefix(OF_DEFAULT) {
            _ if line.is_empty() => {}
            Some(line) => default.push(entry(line)?),
            None => access.push(entry(line)?),
        }
    }
    if access.is_empty() && default.is_empty() {
        return Err("the file has no list".into());
    }
    for entries in [&access, &default] {
        if entries.len() > MAX_ENTRIES {
            return Err(format!("a list has {MAX_ENTRIES} entries at most"));
        }
        if !entries.is_empty() && Acl::new(entries).is_none() {
            return Err(
                "a list needs user::, group:: and other::, each once, and mask:: if it has named entries"
                    .into(),
            );
        }
    }
    let bit = |entries: &[Entry], bit| if entries.is_empty() { 0 } else { bit };
    let mask = bit(&access, ACCESS) | bit(&default, DEFAULT);
    let [access, default] = [access, default].map(|entries| List {
        count: entries.len() as u32,
        entries,
    });
    Ok(Lists {
        mask,
        access,
        default,
    })
}

fn entry(line: &str) -> Done<Entry> {
    let wrong = || format!("{line} is no entry: user:1001:rwx, group::r-x, mask::rwx, other::---");
    let [who, id, rights] = line.split(':').collect::<Vec<_>>()[..] else {
        return Err(wrong());
    };
    let wanted = (who, !id.is_empty());
    let tag = Tag::ALL
        .iter()
        .find(|tag| tag_name(**tag) == wanted)
        .ok_or_else(wrong)?;
    let id = if id.is_empty() { Some(0) } else { id.parse().ok() };
    let letters = rights.chars().count() == LETTERS.len();
    let rights = rights
        .chars()
        .zip(LETTERS)
        .map(|(given, (right, letter))| match given {
            '-' => Some(0),
            _ => (given == letter).then_some(right),
        });
    Ok(Entry {
        tag: *tag,
        id: id.ok_or_else(wrong)?,
        rights: rights
            .sum::<Option<Rights>>()
            .filter(|_| letters)
            .ok_or_else(wrong)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "user::rwx\nuser:7:r--\ngroup::r-x\ngroup:8:-w-\nmask::rwx\nother::--x\n";

    #[test]
    fn lists_are_read_as_they_are_printed() {
        let whole = format!(
            "# file: a\n\n{LIST}default:user::rw-\ndefault:group::r--\t#effective:r--\ndefault:other::---\n"
        );
        let lists = lists(&whole).expect("lists");
        assert_eq!((lists.mask, lists.default.count), (ACCESS | DEFAULT, 3));
        let list = Acl::new(&lists.access.entries).expect("a list");
        assert_eq!(text("", &list), LIST);
    }

    #[test]
    fn bad_lists_are_reported() {
        for line in [
            "user:1001",
            "user::rw",
            "user::xwr",
            "user::rwxr",
            "user:ann:rwx",
            "mask:1:rwx",
            "owner::rwx",
            "user:-1:r--",
        ] {
            assert!(lists(&format!("{LIST}{line}\n")).is_err(), "{line}");
        }
        let long: String = (0..=MAX_ENTRIES).map(|id| format!("user:{id}:rwx\n")).collect();
        for text in [
            "",
            "# nothing\n",
            &format!("{LIST}{long}"),
            "user::rwx\n",
            &LIST.replace("mask::rwx\n", ""),
            &format!("{LIST}other::---\n"),
        ] {
            assert!(lists(text).is_err(), "{text}");
        }
    }
}
