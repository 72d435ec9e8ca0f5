//! `urnic-nfs get` and `urnic-nfs put`, with a window of outstanding READs or WRITEs.

use super::remote::{Remote, Way, kind_name};
use super::{Done, bytes};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::IsTerminal;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use urnic_nfs::client::{Client, Error, Ticket, read, written};
use urnic_nfs::memory::Slice;
use urnic_nfs::nfs3::*;

/// Options of a transfer.
#[derive(Args, Debug)]
pub(crate) struct Window {
    /// Bytes of each READ or WRITE, at most 1M; fewer if the server takes fewer
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = block)]
    block: u64,
    /// Number of outstanding READs or WRITEs
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    /// No progress bar
    #[arg(short, long)]
    quiet: bool,
}

fn block(text: &str) -> Result<u64, String> {
    let bytes = bytes(text)?;
    let fits = (1..=u64::from(MAX_TRANSFER)).contains(&bytes);
    fits.then_some(bytes)
        .ok_or_else(|| format!("{text} is not between 1 and {}", MAX_TRANSFER))
}

/// Arguments of `get`.
#[derive(Args, Debug)]
pub(crate) struct Get {
    /// SERVER:PATH of a file
    remote: Remote,
    /// Local file [default: the name of the remote file]
    local: Option<PathBuf>,
    #[command(flatten)]
    window: Window,
    #[command(flatten)]
    way: Way,
}

/// Arguments of `put`.
#[derive(Args, Debug)]
pub(crate) struct Put {
    /// The file
    local: PathBuf,
    /// SERVER:PATH of the new file, or of a directory to put it in
    remote: Remote,
    #[command(flatten)]
    window: Window,
    #[command(flatten)]
    way: Way,
}

impl Get {
    pub(crate) fn run(&self) -> Done<()> {
        let mut place = self.remote.reach(&self.way)?;
        let (file, attributes) = place.file().map_err(|error| self.remote.failed(&error))?;
        if attributes.kind != Kind::File {
            return Err(self
                .remote
                .failed(&format_args!("is {}", kind_name(attributes.kind))));
        }
        let name = self.remote.name().unwrap_or_default();
        let local = match &self.local {
            Some(local) if local.is_dir() => local.join(name),
            Some(local) => local.clone(),
            None => name.into(),
        };
        let failed = |error: std::io::Error| format!("{}: {error}", local.display());
        let target = File::create(&local).map_err(failed)?;
        let bar = self.window.bar(attributes.size);
        let limits = place.client.limits(file);
        let limits = limits.map_err(|error| self.remote.failed(&error))?;
        let got = self.window.within(limits.read_max).read(
            &mut place.client,
            file,
            attributes.size,
            |offset, data| {
                bar.inc(data.len() as u64);
                target.write_all_at(data, offset)
            },
        );
        got.map_err(|error| self.remote.failed(&error))?;
        bar.finish_and_clear();
        target.sync_all().map_err(failed)
    }
}

impl Put {
    pub(crate) fn run(&self) -> Done<()> {
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", self.local.display());
        let source = File::open(&self.local).map_err(|error| failed(&error))?;
        let metadata = source.metadata().map_err(|error| failed(&error))?;
        if !metadata.is_file() {
            return Err(failed(&"is no regular file"));
        }
        let mut place = self.remote.reach(&self.way)?;
        let name = match (&place.name, self.local.file_name()) {
            (Some(name), _) => Path::new(name).as_os_str(),
            (None, Some(name)) => name,
            (None, None) => return Err(failed(&"has no name")),
        };
        let attributes = SetAttributes {
            mode: Some(metadata.mode() & 0o777),
            size: Some(0),
            ..SetAttributes::default()
        };
        let create = CreateArgs {
            place: Entry {
                dir: place.dir,
                name: name.as_encoded_bytes(),
            },
            how: CreateHow::Unchecked(attributes),
        };
        let name = name.to_owned();
        let created = place.client.nfs::<Created, Wcc>(Procedure::Create, &create);
        let created = created.map_err(|error| self.remote.failed(&error))?;
        let file = match created.file {
            Some(file) => file,
            None => {
                let found = place.client.lookup(place.dir, name.as_encoded_bytes());
                found.map_err(|error| self.remote.failed(&error))?.file
            }
        };
        let bar = self.window.bar(metadata.len());
        let limits = place.client.limits(file);
        let limits = limits.map_err(|error| self.remote.failed(&error))?;
        let put = self.window.within(limits.write_max).write(
            &mut place.client,
            file,
            metadata.len(),
            |offset, data| {
                bar.inc(data.len() as u64);
                source.read_exact_at(data, offset)
            },
        );
        put.map_err(|error| self.remote.failed(&error))?;
        bar.finish_and_clear();
        Ok(())
    }
}

impl Window {
    pub(crate) const fn new(block: u64, depth: u16) -> Self {
        let quiet = true;
        Self { block, depth, quiet }
    }

    /// The options with blocks of at most `most` bytes, the limit of the server.
    pub(crate) fn within(&self, most: u32) -> Self {
        let block = self.block.min(u64::from(most)).max(1);
        Self { block, ..*self }
    }

    /// A progress bar, on a terminal only.
    fn bar(&self, bytes: u64) -> ProgressBar {
        if self.quiet || !std::io::stderr().is_terminal() {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr());
        let style = "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.enable_steady_tick(Duration::from_millis(200));
        bar
    }

    /// Reads `size` bytes, or fewer if the file is shorter.
    pub(crate) fn read(
        &self,
        client: &mut Client,
        file: Handle,
        size: u64,
        mut take: impl FnMut(u64, &[u8]) -> std::io::Result<()>,
    ) -> Result<u64, Error> {
        let mut next = 0;
        let mut again = VecDeque::new();
        let mut end = size;
        let mut under_way = HashMap::<Ticket, (u64, u32)>::new();
        let mut total = 0;
        loop {
            while under_way.len() < usize::from(self.depth) {
                let (offset, count) = match again.pop_front() {
                    Some(short) => short,
                    None if next < end => (next, self.block.min(end - next) as u32),
                    None => break,
                };
                next = next.max(offset + u64::from(count));
                under_way.insert(client.begin_read(file, offset, count)?, (offset, count));
            }
            if under_way.is_empty() {
                return Ok(total);
            }
            let (ticket, answer) = client.wait()?;
            let (offset, count) = under_way
                .remove(&ticket)
                .ok_or(Error::InvalidReply("a reply without a call"))?;
            let (inline, placed, eof) = read(answer)?;
            let data = placed.as_deref().unwrap_or(&inline);
            let len = data.len() as u32;
            if len > count || (len == 0 && !eof) {
                return Err(Error::InvalidReply("a READ of the wrong length"));
            }
            take(offset, data)?;
            total += u64::from(len);
            if eof {
                end = end.min(offset + u64::from(len));
            } else if len < count {
                again.push_back((offset + u64::from(len), count - len));
            }
        }
    }

    /// Writes `size` bytes and commits them. If the server restarted in between, writes all of them
    /// again.
    pub(crate) fn write(
        &self,
        client: &mut Client,
        file: Handle,
        size: u64,
        mut give: impl FnMut(u64, &mut [u8]) -> std::io::Result<()>,
    ) -> Result<(), Error> {
        const TRIES: usize = 3;
        for _ in 0..TRIES {
            let mut verifier = None;
            let mut same = true;
            let mut stable = true;
            let mut next = 0;
            let mut again = VecDeque::<(u64, Slice)>::new();
            let mut under_way = HashMap::<Ticket, (u64, Slice)>::new();
            loop {
                while under_way.len() < usize::from(self.depth) {
                    let (offset, data) = match again.pop_front() {
                        Some(rest) => rest,
                        None if next < size => {
                            let len = self.block.min(size - next);
                            let mut data = client.memory(len as usize)?;
                            give(next, &mut data)?;
                            next += len;
                            (next - len, data.share())
                        }
                        None => break,
                    };
                    let ticket = client.begin_write(file, offset, data.clone(), Stable::Unstable)?;
                    under_way.insert(ticket, (offset, data));
                }
                if under_way.is_empty() {
                    break;
                }
                let (ticket, answer) = client.wait()?;
                let (offset, data) = under_way
                    .remove(&ticket)
                    .ok_or(Error::InvalidReply("a reply without a call"))?;
                let done = written(&answer)?;
                let count = done.count as usize;
                if count == 0 || count > data.len() {
                    return Err(Error::InvalidReply("a WRITE of the wrong length"));
                }
                same &= *verifier.get_or_insert(done.verifier) == done.verifier;
                stable &= done.committed != Stable::Unstable;
                if count < data.len() {
                    again.push_back((offset + count as u64, data.part(count..data.len())));
                }
            }
            if !stable {
                let offset = 0;
                let commit = CommitArgs {
                    file,
                    offset,
                    count: 0,
                };
                let done = client.nfs::<CommitOk, Wcc>(Procedure::Commit, &commit)?;
                same &= verifier == Some(done.verifier);
            }
            if same {
                return Ok(());
            }
        }
        Err(Error::InvalidReply("the write verifier changed at each attempt"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fit_client_and_server() {
        let block = |own, most| Window::new(own, 8).within(most).block;
        assert_eq!(block(1 << 20, 64 << 10), 64 << 10);
        assert_eq!(block(4096, 64 << 10), 4096);
        assert_eq!(
            block(1 << 20, 0),
            1,
            "a server with a maximum of zero bytes gets a WRITE and returns its error"
        );
    }
}
