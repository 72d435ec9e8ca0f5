//! Tests of the service without a network: the client of this crate calls it directly. A directory
//! of this machine and a tree in memory must behave equally.

mod directory;
mod interoperability;
mod lists;
mod random;
mod semantics;

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use urnic_nfs::call::{Answer, Outgoing, Transport};
use urnic_nfs::client::{Client, Error, read, written};
use urnic_nfs::memory::Pool;
use urnic_nfs::nfs3::*;
use urnic_nfs::rpc::Credential;
use urnic_nfs::service::{Request, Response, Service};
use urnic_nfs::tree::{Caller, Directory, InMemory};
use urnic_nfs::{Options, Server};

const PEER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 700);

/// A transport that is a function call. With `apart`, items go apart from messages in both
/// directions.
struct Direct {
    server: Arc<Server>,
    apart: bool,
    answers: VecDeque<(u32, Answer)>,
}

impl Transport for Direct {
    fn submit(&mut self, call: Outgoing) -> std::io::Result<()> {
        let mut message = call.message;
        let item = match call.item {
            Some((at, bytes)) if !self.apart => {
                assert_eq!(at, message.len());
                message.extend_from_slice(&bytes);
                message.resize(message.len().next_multiple_of(4), 0);
                None
            }
            item => item.map(|(_, bytes)| bytes),
        };
        let request = Request {
            peer: PEER,
            message: &message,
            item,
            back: None,
        };
        let xid = u32::from_be_bytes(*message.first_chunk().expect("an xid"));
        let Response { mut message, item } = self.server.call(request).expect("an answer");
        let mut data = None;
        if let Some((at, pieces)) = item {
            assert_eq!(at, message.len());
            let bytes: Vec<u8> = pieces.iter().flat_map(|piece| piece.to_vec()).collect();
            match call.into {
                Some(mut into) if self.apart => {
                    into.resize(bytes.len());
                    into.copy_from_slice(&bytes);
                    data = Some(into);
                }
                _ => {
                    message.extend(bytes);
                    message.resize(message.len().next_multiple_of(4), 0);
                }
            }
        }
        self.answers.push_back((xid, Answer { message, data }));
        Ok(())
    }

    fn wait(&mut self) -> std::io::Result<(u32, Answer)> {
        Ok(self.answers.pop_front().expect("a call was made"))
    }
}

fn me() -> Caller {
    Caller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: Vec::new(),
    }
}

const OPEN: Options = Options {
    read_only: false,
    trust_root: true,
};

fn of_directory(at: &Path, options: Options) -> Arc<Server> {
    rustix::process::umask(rustix::fs::Mode::empty());
    let tree = Directory::new(at, Pool::new(), 512).expect("a directory");
    Arc::new(Server::new(Box::new(tree), options))
}

fn of_memory(limit: u64, options: Options) -> Arc<Server> {
    let tree = InMemory::new(limit, Pool::new(), &me()).expect("memory");
    Arc::new(Server::new(Box::new(tree), options))
}

fn client(server: &Arc<Server>, apart: bool) -> Client {
    let direct = Direct {
        server: server.clone(),
        apart,
        answers: VecDeque::new(),
    };
    Client::new(Box::new(direct), Pool::new())
}

/// A client of another user.
fn client_as(server: &Arc<Server>, uid: u32) -> Client {
    let mut client = client(server, true);
    client.set_credential(Credential::System {
        uid,
        gid: uid,
        groups: vec![],
    });
    client
}

fn status<T: std::fmt::Debug>(result: Result<T, Error>) -> Status {
    match result {
        Err(Error::Nfs(status)) => status,
        other => panic!("{other:?} is no NFS error"),
    }
}

fn create(client: &mut Client, dir: Handle, name: &[u8], mode: u32) -> Result<Handle, Error> {
    let attributes = SetAttributes {
        mode: Some(mode),
        ..SetAttributes::default()
    };
    let arguments = CreateArgs {
        place: Entry { dir, name },
        how: CreateHow::Guarded(attributes),
    };
    let created = client.nfs::<Created, Wcc>(Procedure::Create, &arguments)?;
    Ok(created.file.expect("a handle"))
}

fn mkdir(client: &mut Client, dir: Handle, name: &[u8]) -> Result<Handle, Error> {
    let arguments = MkdirArgs {
        place: Entry { dir, name },
        attributes: SetAttributes::default(),
    };
    let created = client.nfs::<Created, Wcc>(Procedure::Mkdir, &arguments)?;
    Ok(created.file.expect("a handle"))
}

fn remove(client: &mut Client, dir: Handle, name: &[u8]) -> Result<(), Error> {
    client
        .nfs::<Wcc, Wcc>(Procedure::Remove, &Entry { dir, name })
        .map(drop)
}

fn write(client: &mut Client, file: Handle, offset: u64, bytes: &[u8]) -> Result<u32, Error> {
    let mut data = client.memory(bytes.len())?;
    data.copy_from_slice(bytes);
    client.begin_write(file, offset, data.share(), Stable::Unstable)?;
    Ok(written(&client.wait()?.1)?.count)
}

fn contents(client: &mut Client, file: Handle, offset: u64, count: u32) -> Result<(Vec<u8>, bool), Error> {
    client.begin_read(file, offset, count)?;
    let (inline, placed, eof) = read(client.wait()?.1)?;
    Ok((placed.map_or(inline, |data| data.to_vec()), eof))
}
