//! `urnic-nfs bench`: measures a server with a temporary file.

use super::remote::{Remote, Way};
use super::transfer::Window;
use super::{Done, bytes, print};
use clap::Args;
use std::time::Instant;
use urnic_nfs::client::{Client, Error, read, written};
use urnic_nfs::memory::Slice;
use urnic_nfs::nfs3::*;

/// Arguments of `bench`.
#[derive(Args, Debug)]
pub(crate) struct Bench {
    /// SERVER:PATH of a directory
    remote: Remote,
    /// Bytes of the file
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = bytes)]
    size: u64,
    /// Bytes of each large READ and WRITE, at most 1M
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = bytes)]
    block: u64,
    /// Number of outstanding operations
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    /// Small operations, and empty calls, of each kind
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    operations: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    way: Way,
}

const SMALL: u64 = 4096;

impl Bench {
    pub(crate) fn run(&self) -> Done<()> {
        let failed = |error: Error| self.remote.failed(&error);
        let mut place = self.remote.reach(&self.way)?;
        if place.name.is_some() {
            return Err(self.remote.failed(&"is no directory"));
        }
        let name = format!(".urnic-nfs-bench.{}", std::process::id());
        let entry = Entry {
            dir: place.dir,
            name: name.as_bytes(),
        };
        let how = CreateHow::Guarded(SetAttributes {
            mode: Some(0o600),
            ..SetAttributes::default()
        });
        let client = &mut place.client;
        let created = client.nfs::<Created, Wcc>(Procedure::Create, &CreateArgs { place: entry, how });
        created.map_err(failed)?;
        let file = client.lookup(entry.dir, entry.name).map_err(failed)?.file;
        let measured = self.measure(client, file);
        let removed = client.nfs::<Wcc, Wcc>(Procedure::Remove, &entry);
        let rows = measured.map_err(failed)?;
        removed.map_err(failed)?;
        if self.json {
            let fields: Vec<_> = rows
                .iter()
                .map(|(name, value, _)| format!("\"{name}\": {value:.1}"))
                .collect();
            print(&format!("{{{}}}\n", fields.join(", ")))?;
        } else {
            let lines = rows
                .iter()
                .map(|(name, value, unit)| format!("{name:12} {value:10.1} {unit}\n"));
            print(&lines.collect::<String>())?;
        }
        Ok(())
    }

    fn measure(
        &self,
        client: &mut Client,
        file: Handle,
    ) -> Result<Vec<(&'static str, f64, &'static str)>, Error> {
        let block = self.block.clamp(1, u64::from(MAX_TRANSFER));
        let window = Window::new(block, self.depth);
        let mut rows = Vec::new();
        let mut pattern = client.memory(block as usize)?;
        pattern
            .iter_mut()
            .enumerate()
            .for_each(|(at, byte)| *byte = (at * 7 + at / 4096) as u8);
        let pattern = pattern.share();
        let timed = |work: &mut dyn FnMut() -> Result<(), Error>| {
            let begun = Instant::now();
            work()?;
            Ok::<_, Error>(begun.elapsed().as_secs_f64())
        };
        const MIB: f64 = (1 << 20) as f64;
        let seconds = timed(&mut || {
            window.write(client, file, self.size, |_, data| {
                data.copy_from_slice(&pattern[..data.len()]);
                Ok(())
            })
        })?;
        rows.push(("write", self.size as f64 / MIB / seconds, "MiB/s"));
        let mut read_back = 0;
        let seconds = timed(&mut || {
            read_back = window.read(client, file, self.size, |_, _| Ok(()))?;
            Ok(())
        })?;
        if read_back != self.size {
            return Err(Error::InvalidReply(
                "the size of the file is not the size written",
            ));
        }
        rows.push(("read", self.size as f64 / MIB / seconds, "MiB/s"));
        for what in [Small::Write, Small::Read, Small::Null] {
            let seconds = timed(&mut || self.small(client, file, what, &pattern))?;
            rows.push((what.name(), self.operations as f64 / seconds, "per second"));
        }
        Ok(rows)
    }

    fn small(&self, client: &mut Client, file: Handle, what: Small, pattern: &Slice) -> Result<(), Error> {
        let blocks = (self.size / SMALL).max(1);
        let (mut begun, mut ended) = (0_u64, 0);
        while ended < self.operations {
            while begun < self.operations && begun - ended < u64::from(self.depth) {
                // Steps through the whole file, in an order that read-ahead does not predict.
                let offset = begun.wrapping_mul(0x9e37_79b9_7f4a_7c15) % blocks * SMALL;
                match what {
                    Small::Write => {
                        let data = pattern.part(0..SMALL as usize);
                        client.begin_write(file, offset, data, Stable::Unstable)?;
                    }
                    Small::Read => drop(client.begin_read(file, offset, SMALL as u32)?),
                    Small::Null => drop(client.begin_null()?),
                }
                begun += 1;
            }
            let (_, answer) = client.wait()?;
            match what {
                Small::Write => drop(written(&answer)?),
                Small::Read => drop(read(answer)?),
                Small::Null => {}
            }
            ended += 1;
        }
        Ok(())
    }
}

#[derive(Clone, Copy)]
enum Small {
    Write,
    Read,
    Null,
}

impl Small {
    const fn name(self) -> &'static str {
        match self {
            Self::Write => "write_4k",
            Self::Read => "read_4k",
            Self::Null => "null",
        }
    }
}
