//! The service: NFSv3, NFSACL and MOUNT over a tree. This module finds the procedure of a call; the
//! modules below execute it.

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
use crate::nfs3::{PROGRAM, Procedure, VERSION};
use crate::nfsacl;
use crate::rpc::{self, Call, NoCall, Refusal};
use crate::service::{Request, Response, Service};
use crate::tree::Tree;
use crate::xdr::Reader;
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
            Procedure::Getattr => export.getattr(args, out)?,
            Procedure::Setattr => export.setattr(caller, args, out)?,
            Procedure::Lookup => export.lookup(caller, args, out)?,
            Procedure::Access => export.access(caller, args, out)?,
            Procedure::Readlink => data = export.readlink(args, out)?,
            Procedure::Read => data = export.read(caller, args, out)?,
            Procedure::Write => export.write(caller, args, item, out)?,
            Procedure::Create => export.create(caller, args, out)?,
            Procedure::Mkdir => export.mkdir(caller, args, out)?,
            Procedure::Symlink => export.symlink(caller, args, item, out)?,
            Procedure::Mknod => export.mknod(caller, args, out)?,
            Procedure::Remove => export.remove(caller, false, args, out)?,
            Procedure::Rmdir => export.remove(caller, true, args, out)?,
            Procedure::Rename => export.rename(caller, args, out)?,
            Procedure::Link => export.link(caller, args, out)?,
            Procedure::Readdir => export.readdir(caller, args, out)?,
            Procedure::Readdirplus => export.readdirplus(caller, args, out)?,
            Procedure::Fsstat => export.fsstat(args, out)?,
            Procedure::Fsinfo => export.fsinfo(args, out)?,
            Procedure::Pathconf => export.pathconf(args, out)?,
            Procedure::Commit => export.commit(caller, args, out)?,
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
