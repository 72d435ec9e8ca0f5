//! The service: NFSv3, NFSACL and MOUNT over a tree. This module finds the procedure of a call; the
//! modules below execute it.

#![expect(
    clippy::result_large_err,
    reason = "a reply that is a failure has attributes, too, and is encoded at once"
)]

mod acls;
mod directories;
mod export;
mod files;
mod mounts;
mod names;
mod system;

use crate::duplicates::Duplicates;
use crate::memory::Slice;
use crate::mount3;
use crate::nfs3::{MAX_TRANSFER, PROGRAM, Procedure, SymlinkArgs, VERSION, WriteArgs};
use crate::nfsacl;
use crate::rpc::{self, Call, NoCall, Refusal};
use crate::service::{Request, Response, Service};
use crate::tree::Tree;
use crate::xdr::{BadXdr, Reader, Xdr};
use export::{Export, Made};
use mounts::Mounts;
use std::net::SocketAddr;

pub use export::Options;

/// Bytes of a WRITE's message, and bytes of its data, that identify a repeated WRITE. The longest
/// credential and handle fit into this part of the message.
const HASHED: usize = 1024;

/// A server of a tree.
pub struct Server {
    export: Export,
    duplicates: Duplicates,
    /// Replies to WRITEs. They are separate, because they are numerous and would displace the other
    /// replies.
    writes: Duplicates,
    mounts: Mounts,
}

impl Server {
    /// A server of `tree`.
    pub fn new(tree: Box<dyn Tree>, options: Options) -> Self {
        Self {
            export: Export::new(tree, options),
            duplicates: Duplicates::default(),
            writes: Duplicates::default(),
            mounts: Mounts::default(),
        }
    }

    /// The memory of the tree, into which transports receive data.
    pub fn pool(&self) -> &crate::memory::Pool {
        self.export.tree.pool()
    }

    fn serve(&self, peer: SocketAddr, message: &[u8], item: Option<&Slice>) -> Result<Response, NoCall> {
        let (call, arguments) = Call::parse(message)?;
        tracing::trace!(%peer, program = call.program, procedure = call.procedure, xid = call.xid, "call");
        let refuse = |refusal| Ok(plain(rpc::refused(call.xid, refusal, 3)));
        let once = |duplicates: &Duplicates, most: usize, serve: &dyn Fn() -> Made| {
            let first = |bytes: &'_ [u8]| bytes.len().min(most);
            let data = item.map_or(&[][..], |item| item);
            let bytes = (&message[..first(message)], &data[..first(data)]);
            Ok(plain(duplicates.once(peer.ip(), &call, bytes, || {
                match serve() {
                    Ok((reply, _)) => reply,
                    Err(_) => rpc::refused(call.xid, Refusal::Garbage, 3),
                }
            })))
        };
        let made = match (call.program, call.version) {
            (PROGRAM, VERSION) => match Procedure::of(call.procedure) {
                Some(procedure) if once_only(procedure) => {
                    let (duplicates, most) = match procedure {
                        Procedure::Write => (&self.writes, HASHED),
                        _ => (&self.duplicates, usize::MAX),
                    };
                    return once(duplicates, most, &|| self.nfs(&call, procedure, arguments, item));
                }
                Some(procedure) => self.nfs(&call, procedure, arguments, item),
                None => return refuse(Refusal::NoProcedure),
            },
            (nfsacl::PROGRAM, nfsacl::VERSION) => match nfsacl::Procedure::of(call.procedure) {
                Some(procedure @ nfsacl::Procedure::Setacl) => {
                    let serve = || self.export.nfsacl(&call, procedure, arguments);
                    return once(&self.duplicates, usize::MAX, &serve);
                }
                Some(procedure) => self.export.nfsacl(&call, procedure, arguments),
                None => return refuse(Refusal::NoProcedure),
            },
            (mount3::PROGRAM, mount3::VERSION) => match mount3::Procedure::of(call.procedure) {
                Some(procedure) => (self.mounts).mount(&self.export, &call, procedure, arguments, peer.ip()),
                None => return refuse(Refusal::NoProcedure),
            },
            (PROGRAM | nfsacl::PROGRAM | mount3::PROGRAM, _) => return refuse(Refusal::NoVersion),
            _ => return refuse(Refusal::NoProgram),
        };
        match made {
            Ok((message, item)) => {
                let item = item.map(|pieces| (message.len(), pieces));
                Ok(Response { message, item })
            }
            Err(why) => {
                tracing::debug!(%peer, ?call, %why, "garbage arguments");
                refuse(Refusal::Garbage)
            }
        }
    }

    /// Answers a call of NFSv3.
    fn nfs<'a>(
        &self,
        call: &Call,
        procedure: Procedure,
        mut arguments: Reader<'a>,
        item: Option<&'a Slice>,
    ) -> Made {
        let export = &self.export;
        let caller = &export.caller(&call.credential);
        let args = &mut arguments;
        let mut reply = rpc::accepted(call.xid);
        let out = &mut reply;
        let mut data = None;
        match procedure {
            Procedure::Null => {}
            Procedure::Getattr => export.getattr(Xdr::take(args)?).put(out),
            Procedure::Setattr => export.setattr(caller, Xdr::take(args)?).put(out),
            Procedure::Lookup => export.lookup(caller, Xdr::take(args)?).put(out),
            Procedure::Access => export.access(caller, Xdr::take(args)?).put(out),
            Procedure::Readlink => {
                let (found, text) = export.readlink(Xdr::take(args)?);
                found.put(out);
                data = text;
            }
            Procedure::Read => {
                let (found, read) = export.read(caller, Xdr::take(args)?);
                found.put(out);
                data = read;
            }
            Procedure::Write => {
                let write = WriteArgs::take(args)?;
                let written = export::data(item, write.len, args)?;
                if write.len != write.count || write.len > MAX_TRANSFER {
                    return Err(BadXdr::Length(write.len));
                }
                export.write(caller, write, written).put(out);
            }
            Procedure::Create => export.create(caller, Xdr::take(args)?).put(out),
            Procedure::Mkdir => export.mkdir(caller, Xdr::take(args)?).put(out),
            Procedure::Symlink => {
                let symlink = SymlinkArgs::take(args)?;
                let text = export::data(item, symlink.len, args)?;
                export.symlink(caller, symlink, text).put(out);
            }
            Procedure::Mknod => export.mknod(caller, Xdr::take(args)?).put(out),
            Procedure::Remove => export.remove(caller, false, Xdr::take(args)?).put(out),
            Procedure::Rmdir => export.remove(caller, true, Xdr::take(args)?).put(out),
            Procedure::Rename => export.rename(caller, Xdr::take(args)?).put(out),
            Procedure::Link => export.link(caller, Xdr::take(args)?).put(out),
            Procedure::Readdir => export.readdir(caller, Xdr::take(args)?, out),
            Procedure::Readdirplus => export.readdirplus(caller, Xdr::take(args)?, out),
            Procedure::Fsstat => export.fsstat(Xdr::take(args)?).put(out),
            Procedure::Fsinfo => export.fsinfo(Xdr::take(args)?).put(out),
            Procedure::Pathconf => export.pathconf(Xdr::take(args)?).put(out),
            Procedure::Commit => export.commit(caller, Xdr::take(args)?).put(out),
        }
        Ok((reply, data))
    }
}

impl Service for Server {
    fn call(&self, request: Request<'_>) -> Option<Response> {
        match self.serve(request.peer, request.message, request.item.as_ref()) {
            Ok(response) => Some(response),
            Err(NoCall::Answer(reply)) => Some(plain(reply)),
            Err(NoCall::Discard) => None,
        }
    }
}

const fn plain(message: Vec<u8>) -> Response {
    Response { message, item: None }
}

/// Whether a procedure must not run twice for one call. A WRITE could run twice in succession, but
/// not after another WRITE that its client sent after the first reply.
const fn once_only(procedure: Procedure) -> bool {
    use Procedure::{Create, Link, Mkdir, Mknod, Remove, Rename, Rmdir, Setattr, Symlink, Write};
    matches!(
        procedure,
        Setattr | Create | Mkdir | Symlink | Mknod | Remove | Rmdir | Rename | Link | Write
    )
}
