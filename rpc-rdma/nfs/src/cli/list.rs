//! `urnic-nfs ls`.

use super::remote::{Remote, Way};
use super::{Done, print};
use clap::Args;
use std::fmt::Write as _;
use urnic_nfs::nfs3::{Attributes, Kind};

/// Arguments of `ls`.
#[derive(Args, Debug)]
pub(crate) struct List {
    /// SERVER:PATH
    remote: Remote,
    /// Also show mode, links, owner, group and size
    #[arg(short, long)]
    long: bool,
    #[command(flatten)]
    way: Way,
}

impl List {
    pub(crate) fn run(&self) -> Done<()> {
        let failed = |error: &dyn std::fmt::Display| self.remote.failed(error);
        let mut place = self.remote.reach(&self.way)?;
        let (file, attributes) = place.file().map_err(|error| failed(&error))?;
        let mut entries: Vec<(Vec<u8>, _)> = if attributes.kind == Kind::Directory {
            let listed = place.client.list(file).map_err(|error| failed(&error))?;
            listed
                .into_iter()
                .map(|entry| (entry.name, entry.attributes))
                .collect()
        } else {
            vec![(self.remote.name().unwrap_or_default().into(), Some(attributes))]
        };
        entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut text = String::new();
        for (name, attributes) in &entries {
            if self.long {
                let known = attributes.as_ref().map(described);
                text.push_str(known.as_deref().unwrap_or("??????????"));
                text.push(' ');
            }
            // A name may contain escape sequences, which must not reach a terminal.
            let _ = writeln!(text, "{}", name.escape_ascii());
        }
        print(&text)
    }
}

fn described(file: &Attributes) -> String {
    let kind = match file.kind {
        Kind::File => '-',
        Kind::Directory => 'd',
        Kind::Block => 'b',
        Kind::Character => 'c',
        Kind::Symlink => 'l',
        Kind::Socket => 's',
        Kind::Fifo => 'p',
    };
    let bit = |n: u32| {
        if file.mode >> n & 1 == 1 {
            ['x', 'w', 'r'][n as usize % 3]
        } else {
            '-'
        }
    };
    let mode: String = (0..9).rev().map(bit).collect();
    let Attributes {
        links,
        uid,
        gid,
        size,
        ..
    } = file;
    format!("{kind}{mode} {links:3} {uid:5} {gid:5} {size:12}")
}
