//! A client: typed calls, and several outstanding READs and WRITEs.

use crate::call::{Answer, Outgoing, Transport};
use crate::memory::{Buffer, Pool, Slice};
use crate::mount3;
use crate::nfs3::*;
use crate::nfsacl::{self, GetaclArgs, GetaclOk, Lists, SetaclArgs};
use crate::rpc::{self, Call, Credential, MAX_GROUPS, NoResults};
use crate::xdr::{BadXdr, Reader, Xdr};
use std::collections::HashMap;
use std::io;

/// Errors of a client.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The call has no results.
    #[error(transparent)]
    Rpc(#[from] NoResults),
    /// The server returned an error.
    #[error(transparent)]
    Nfs(#[from] Status),
    /// MOUNT returned an error.
    #[error("cannot be mounted: {0}")]
    Mount(#[from] mount3::Status),
    /// The answer contradicts itself or the call.
    #[error("the server's reply is invalid: {0}")]
    InvalidReply(&'static str),
}

impl From<BadXdr> for Error {
    fn from(error: BadXdr) -> Self {
        NoResults::from(error).into()
    }
}

/// A result of a client.
pub type Outcome<T> = Result<T, Error>;

/// A client of one server.
pub struct Client {
    transport: Box<dyn Transport>,
    credential: Credential,
    pool: Pool,
    xid: u32,
    /// Answers that arrived before the one that the client waited for.
    early: HashMap<u32, Answer>,
}

/// An entry of a directory.
#[derive(Clone, Debug)]
pub struct Listed {
    /// The name of the entry.
    pub name: Vec<u8>,
    /// Attributes of the file, if the server returned them.
    pub attributes: Option<Attributes>,
}

/// An outstanding call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u32);

impl Client {
    /// A client with the identity of this process.
    pub fn new(transport: Box<dyn Transport>, pool: Pool) -> Self {
        let groups = rustix::process::getgroups().unwrap_or_default();
        let credential = Credential::System {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: groups.iter().map(|gid| gid.as_raw()).take(MAX_GROUPS).collect(),
        };
        // Servers keep replies by xid: two clients of one host, or one after the other, should not
        // begin with the same.
        let mut seed = [0; 4];
        let _ = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty());
        Self {
            transport,
            credential,
            pool,
            xid: u32::from_ne_bytes(seed),
            early: HashMap::new(),
        }
    }

    /// Sets the identity of the calls.
    pub fn set_credential(&mut self, credential: Credential) {
        self.credential = credential;
    }

    /// Memory for data.
    pub const fn pool(&self) -> &Pool {
        &self.pool
    }

    fn message<'a>(
        &mut self,
        program: (u32, u32),
        procedure: u32,
        arguments: &impl Xdr<'a>,
    ) -> (u32, Vec<u8>) {
        self.xid = self.xid.wrapping_add(1);
        let (program, version) = program;
        let call = Call {
            xid: self.xid,
            program,
            version,
            procedure,
            credential: self.credential.clone(),
        };
        let mut message = call.emit();
        arguments.put(&mut message);
        (self.xid, message)
    }

    fn wait_for(&mut self, xid: u32) -> Outcome<Answer> {
        loop {
            if let Some(answer) = self.early.remove(&xid) {
                return Ok(answer);
            }
            let (which, answer) = self.transport.wait()?;
            self.early.insert(which, answer);
        }
    }

    /// Calls, waits, and parses the results with `take`.
    fn call<'a, T>(
        &mut self,
        program: (u32, u32),
        procedure: u32,
        arguments: &impl Xdr<'a>,
        item: Option<Slice>,
        max_results: usize,
        take: impl FnOnce(&mut Reader<'_>) -> Outcome<T>,
    ) -> Outcome<T> {
        let (xid, message) = self.message(program, procedure, arguments);
        let item = item.map(|item| (message.len(), item));
        let max_reply = rpc_header() + max_results;
        self.transport.submit(Outgoing {
            message,
            item,
            max_reply,
            into: None,
        })?;
        let answer = self.wait_for(xid)?;
        take(&mut rpc::results(&answer.message)?)
    }

    /// Calls an NFS procedure whose results have a fixed form.
    ///
    /// # Errors
    /// An error of the connection, the call or the server.
    pub fn nfs<'x, T, F>(&mut self, procedure: Procedure, arguments: &impl Xdr<'x>) -> Outcome<T>
    where
        T: for<'a> Xdr<'a>,
        F: for<'a> Xdr<'a>,
    {
        self.call(
            (PROGRAM, VERSION),
            procedure as u32,
            arguments,
            None,
            FIXED_RESULTS,
            |results| Reply::<T, F>::take(results)?.map_err(|(status, _)| status.into()),
        )
    }

    /// Calls NULL, which has no effect.
    ///
    /// # Errors
    /// There is no answer.
    pub fn null(&mut self) -> Outcome<()> {
        self.call((PROGRAM, VERSION), Procedure::Null as u32, &(), None, 0, |_| {
            Ok(())
        })
    }

    /// Calls MNT of the MOUNT service at the other end of the transport. Returns the handle of an
    /// exported directory.
    ///
    /// # Errors
    /// The directory cannot be mounted.
    pub fn mount(&mut self, path: &[u8]) -> Outcome<Handle> {
        let procedure = mount3::Procedure::Mnt as u32;
        self.call(
            (mount3::PROGRAM, mount3::VERSION),
            procedure,
            &path,
            None,
            FIXED_RESULTS,
            |results| Ok(mount3::take_mnt(results)??),
        )
    }

    /// Calls FSINFO, which returns the limits of the server.
    ///
    /// # Errors
    /// An error of the connection, the call or the server.
    pub fn limits(&mut self, file: Handle) -> Outcome<FsinfoOk> {
        self.nfs::<FsinfoOk, Option<Attributes>>(Procedure::Fsinfo, &file)
    }

    /// Calls LOOKUP, which finds a name in a directory.
    ///
    /// # Errors
    /// An error of the connection, the call or the server.
    pub fn lookup(&mut self, dir: Handle, name: &[u8]) -> Outcome<LookupOk> {
        self.nfs::<LookupOk, Option<Attributes>>(Procedure::Lookup, &Entry { dir, name })
    }

    /// Calls GETATTR, which returns the attributes of a file.
    ///
    /// # Errors
    /// An error of the connection, the call or the server.
    pub fn attributes(&mut self, file: Handle) -> Outcome<Attributes> {
        self.nfs::<Attributes, ()>(Procedure::Getattr, &file)
    }

    /// Calls GETACL, which returns the parts of a file's access control lists that `mask` selects.
    ///
    /// # Errors
    /// An error of the connection, the call or the server.
    pub fn acls(&mut self, file: Handle, mask: u32) -> Outcome<Lists> {
        self.call(
            (nfsacl::PROGRAM, nfsacl::VERSION),
            nfsacl::Procedure::Getacl as u32,
            &GetaclArgs { file, mask },
            None,
            nfsacl::MAX_RESULTS,
            |results| {
                let got = Reply::<GetaclOk, Option<Attributes>>::take(results)?;
                Ok(got.map_err(|(status, _)| status)?.1)
            },
        )
    }

    /// Calls SETACL, which sets a file's access control lists.
    ///
    /// # Errors
    /// An error of the connection, the call or the server.
    pub fn set_acls(&mut self, file: Handle, lists: Lists) -> Outcome<()> {
        let arguments: SetaclArgs = (file, lists);
        self.call(
            (nfsacl::PROGRAM, nfsacl::VERSION),
            nfsacl::Procedure::Setacl as u32,
            &arguments,
            None,
            FIXED_RESULTS,
            |results| {
                let set = Reply::<Option<Attributes>, Option<Attributes>>::take(results)?;
                set.map(drop).map_err(|(status, _)| status.into())
            },
        )
    }

    /// Calls READLINK, which returns the text of a symbolic link.
    ///
    /// # Errors
    /// An error of the connection, the call or the server.
    pub fn read_link(&mut self, file: Handle) -> Outcome<Vec<u8>> {
        let results = FIXED_RESULTS + MAX_PATH + 1;
        self.call(
            (PROGRAM, VERSION),
            Procedure::Readlink as u32,
            &file,
            None,
            results,
            |results| {
                let link =
                    Reply::<ReadlinkOk, Option<Attributes>>::take(results)?.map_err(|(status, _)| status)?;
                Ok(results.bytes(link.len as usize)?.to_vec())
            },
        )
    }

    /// Calls SYMLINK, which makes a symbolic link.
    ///
    /// # Errors
    /// An error of the connection, the call or the server.
    pub fn symlink(&mut self, place: Entry<'_>, text: &[u8]) -> Outcome<Created> {
        let mut memory = self.memory(text.len())?;
        memory.copy_from_slice(text);
        let arguments = SymlinkArgs {
            place,
            attributes: SetAttributes::default(),
            len: text.len() as u32,
        };
        let text = Some(memory.share());
        self.call(
            (PROGRAM, VERSION),
            Procedure::Symlink as u32,
            &arguments,
            text,
            FIXED_RESULTS,
            |results| Reply::<_, Wcc>::take(results)?.map_err(|(status, _)| status.into()),
        )
    }

    /// The entries of a directory without `.` and `..`.
    ///
    /// # Errors
    /// An error of the connection, the call or the server.
    pub fn list(&mut self, dir: Handle) -> Outcome<Vec<Listed>> {
        let mut all = Vec::new();
        let (mut cookie, mut verifier) = (0, [0; 8]);
        loop {
            const COUNT: u32 = 64 << 10;
            let arguments = ReaddirplusArgs {
                dir,
                cookie,
                verifier,
                names: COUNT,
                count: COUNT,
            };
            let procedure = Procedure::Readdirplus as u32;
            let before = cookie;
            let complete = self.call(
                (PROGRAM, VERSION),
                procedure,
                &arguments,
                None,
                COUNT as usize + 128,
                |results| {
                    let head = Reply::<ReaddirOk, Option<Attributes>>::take(results)?
                        .map_err(|(status, _)| status)?;
                    verifier = head.verifier;
                    while let Some(entry) = <Option<ListedPlus<'_>> as Xdr>::take(results)? {
                        cookie = entry.entry.cookie;
                        if !matches!(entry.entry.name, b"." | b"..") {
                            let (name, attributes) = (entry.entry.name.to_vec(), entry.attributes);
                            all.push(Listed { name, attributes });
                        }
                    }
                    Ok(bool::take(results)?)
                },
            )?;
            if complete {
                return Ok(all);
            }
            if cookie == before {
                return Err(Error::InvalidReply("a directory listing makes no progress"));
            }
        }
    }

    /// Memory for the data of a READ or WRITE.
    ///
    /// # Errors
    /// There is no memory.
    pub fn memory(&self, len: usize) -> Outcome<Buffer> {
        let none = || io::Error::from(io::ErrorKind::OutOfMemory).into();
        self.pool.take(len).ok_or_else(none)
    }

    /// Begins a READ.
    ///
    /// # Errors
    /// An error of the connection.
    pub fn begin_read(&mut self, file: Handle, offset: u64, count: u32) -> Outcome<Ticket> {
        let into = self.memory(count as usize)?;
        let (xid, message) = self.message(
            (PROGRAM, VERSION),
            Procedure::Read as u32,
            &ReadArgs { file, offset, count },
        );
        self.transport.submit(Outgoing {
            message,
            item: None,
            max_reply: rpc_header() + FIXED_RESULTS,
            into: Some(into),
        })?;
        Ok(Ticket(xid))
    }

    /// Begins a WRITE.
    ///
    /// # Errors
    /// An error of the connection.
    pub fn begin_write(&mut self, file: Handle, offset: u64, data: Slice, stable: Stable) -> Outcome<Ticket> {
        let count = data.len() as u32;
        let arguments = WriteArgs {
            file,
            offset,
            count,
            stable,
            len: count,
        };
        let (xid, message) = self.message((PROGRAM, VERSION), Procedure::Write as u32, &arguments);
        self.transport.submit(Outgoing {
            item: Some((message.len(), data)),
            message,
            max_reply: rpc_header() + FIXED_RESULTS,
            into: None,
        })?;
        Ok(Ticket(xid))
    }

    /// Begins a NULL.
    ///
    /// # Errors
    /// An error of the connection.
    pub fn begin_null(&mut self) -> Outcome<Ticket> {
        let (xid, message) = self.message((PROGRAM, VERSION), Procedure::Null as u32, &());
        self.transport.submit(Outgoing {
            message,
            item: None,
            max_reply: rpc_header(),
            into: None,
        })?;
        Ok(Ticket(xid))
    }

    /// Waits for the answer to any outstanding call.
    ///
    /// # Errors
    /// An error of the connection.
    pub fn wait(&mut self) -> Outcome<(Ticket, Answer)> {
        let (xid, answer) = self.transport.wait()?;
        Ok((Ticket(xid), answer))
    }
}

/// Parses the results of a READ: the data as part of the message or in memory of its own, and
/// whether it ends at the end of the file.
///
/// # Errors
/// An error of the connection, the call or the server.
pub fn read(answer: Answer) -> Outcome<(Vec<u8>, Option<Buffer>, bool)> {
    let mut results = rpc::results(&answer.message)?;
    let read = Reply::<ReadOk, Option<Attributes>>::take(&mut results)?.map_err(|(status, _)| status)?;
    if let Some(data) = answer.data {
        return Ok((Vec::new(), Some(data), read.eof));
    }
    Ok((results.bytes(read.len as usize)?.to_vec(), None, read.eof))
}

/// Parses the results of a WRITE.
///
/// # Errors
/// An error of the connection, the call or the server.
pub fn written(answer: &Answer) -> Outcome<WriteOk> {
    let mut results = rpc::results(&answer.message)?;
    Reply::<WriteOk, Wcc>::take(&mut results)?.map_err(|(status, _)| status.into())
}

const fn rpc_header() -> usize {
    urnic_rpc_rdma::rpc::MAX_REPLY_HEADER
}

/// Maximum bytes of results of bounded length. RENAME has the longest.
const FIXED_RESULTS: usize = 512;
