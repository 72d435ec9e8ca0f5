//! Procedures of MOUNT version 3 (RFC 1813 appendix I).

use super::export::{Export, Made};
use crate::mount3::{self, Procedure};
use crate::nfs3::{Handle, Kind, Status};
use crate::rpc::{self, Call};
use crate::tree::{Caller, check_name};
use crate::xdr::{Reader, Xdr};
use std::net::IpAddr;
use urnic_sync::Mutex;

/// Maximum number of mounts that DUMP lists.
const MOUNTS: usize = 256;

/// The clients that mounted a path, in the order of their calls.
#[derive(Default)]
pub(super) struct Mounts(Mutex<Vec<(IpAddr, Vec<u8>)>>);

impl Mounts {
    /// Answers a call of MOUNT from `peer`.
    pub(super) fn mount(
        &self,
        export: &Export,
        call: &Call,
        procedure: Procedure,
        mut arguments: Reader<'_>,
        peer: IpAddr,
    ) -> Made {
        let mut reply = rpc::accepted(call.xid);
        let mut mounts = self.0.lock();
        let args = &mut arguments;
        match procedure {
            Procedure::Null => {}
            Procedure::Mnt => {
                let path = <&[u8]>::take(args)?;
                let found = export.walk(&export.caller(&call.credential), path);
                if found.is_ok() {
                    mounts.retain(|(host, at)| (*host, &at[..]) != (peer, path));
                    if mounts.len() == MOUNTS {
                        mounts.remove(0);
                    }
                    mounts.push((peer, path.to_vec()));
                }
                mount3::put_mnt(&found, &mut reply);
            }
            Procedure::Dump => {
                for (host, path) in &*mounts {
                    (true, (host.to_string().as_bytes(), &path[..])).put(&mut reply);
                }
                false.put(&mut reply);
            }
            Procedure::Umnt => {
                let path = <&[u8]>::take(args)?;
                mounts.retain(|(host, at)| (*host, &at[..]) != (peer, path));
            }
            Procedure::Umntall => mounts.retain(|(host, _)| *host != peer),
            // There is one export, for every client.
            Procedure::Export => (true, (&b"/"[..], (false, false))).put(&mut reply),
        }
        Ok((reply, None))
    }
}

impl Export {
    /// The directory at a path from the root of the export. Symbolic links are not followed.
    fn walk(&self, caller: &Caller, path: &[u8]) -> Result<Handle, mount3::Status> {
        if path.len() > mount3::MAX_PATH {
            return Err(mount3::Status::NameTooLong);
        }
        let mut dir = self.tree.root();
        for name in path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            check_name(name).map_err(status)?;
            let (below, attributes) = self.tree.lookup(caller, &dir, name).map_err(status)?;
            if attributes.kind != Kind::Directory {
                return Err(mount3::Status::NotDir);
            }
            dir = below;
        }
        Ok(dir)
    }
}

/// The status of MOUNT for a status of NFS.
fn status(of_nfs: Status) -> mount3::Status {
    match of_nfs {
        Status::NoEnt => mount3::Status::NoEnt,
        Status::NotDir => mount3::Status::NotDir,
        Status::Access | Status::Perm => mount3::Status::Access,
        Status::NameTooLong => mount3::Status::NameTooLong,
        Status::Invalid => mount3::Status::Invalid,
        _ => mount3::Status::Io,
    }
}
