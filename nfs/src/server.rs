//! The service: NFSv3, its access control lists, and MOUNT over a tree.

use crate::duplicates::Duplicates;
use crate::lock::lock;
use crate::memory::Slice;
use crate::mount3;
use crate::nfs3::*;
use crate::nfsacl::{self, GetaclArgs, Lists, SetaclArgs};
use crate::rpc::{self, Call, Credential, NoCall, Refusal};
use crate::service::{Request, Response, Service};
use crate::tree::{Caller, Data, Found, Listing, Listings, New, Outcome, PARENT, SELF, Tree, check_name};
use crate::xdr::{BadXdr, Reader, Xdr};
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

/// User and group of those who may not say who they are, as everywhere.
const NOBODY: u32 = 65534;

/// Bytes of a READDIR or READDIRPLUS reply, at most.
const MAX_LISTING: u32 = 1 << 20;

/// Bytes of a WRITE, and of its data, by which it is known again: the message's have room for the longest credential and handle.
const HASHED: usize = 1024;

/// Mounts remembered for DUMP.
const MOUNTS: usize = 256;

/// How it is served.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Nothing may be changed.
    pub read_only: bool,
    /// Clients' root is root here, not nobody.
    pub trust_root: bool,
}

/// Serves a tree.
pub struct Server {
    tree: Box<dyn Tree>,
    options: Options,
    listings: Listings,
    duplicates: Duplicates,
    /// Apart, since they are so many that they would push the others out.
    writes: Duplicates,
    /// Another one for each process: what the one before had not committed may be lost.
    verifier: Verifier,
    mounts: Mutex<Vec<(IpAddr, Vec<u8>)>>,
}

/// What a procedure found out: a reply, and data that belongs behind it.
type Made = Result<(Vec<u8>, Option<Vec<Slice>>), BadXdr>;

impl Server {
    /// A server of `tree`.
    pub fn new(tree: Box<dyn Tree>, options: Options) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let verifier = (now.as_nanos() as u64) ^ u64::from(std::process::id()).rotate_right(16);
        Self {
            tree,
            options,
            listings: Listings::default(),
            duplicates: Duplicates::default(),
            writes: Duplicates::default(),
            verifier: verifier.to_be_bytes(),
            mounts: Mutex::default(),
        }
    }

    /// Memory that data is in.
    pub fn pool(&self) -> &crate::memory::Pool {
        self.tree.pool()
    }

    fn caller(&self, credential: &Credential) -> Caller {
        let (uid, gid, groups) = match credential {
            Credential::Nobody => (NOBODY, NOBODY, Vec::new()),
            Credential::System { uid, gid, groups } => (*uid, *gid, groups.clone()),
        };
        if self.options.trust_root {
            return Caller { uid, gid, groups };
        }
        if uid == 0 {
            let (uid, gid, groups) = (NOBODY, NOBODY, Vec::new());
            return Caller { uid, gid, groups };
        }
        let squash = |gid| if gid == 0 { NOBODY } else { gid };
        Caller {
            uid,
            gid: squash(gid),
            groups: groups.into_iter().map(squash).collect(),
        }
    }

    fn after(&self, file: &Handle) -> Option<Attributes> {
        self.tree.attributes(file).ok()
    }

    fn before(&self, file: &Handle) -> Option<Before> {
        self.after(file).map(|attributes| attributes.before())
    }

    /// Has `change` done between looks at what it changes.
    fn around<T>(&self, file: &Handle, change: impl FnOnce() -> Outcome<T>) -> (Outcome<T>, Wcc) {
        let before = self.before(file);
        let done = self.may_change().and_then(|()| change());
        let after = self.after(file);
        (done, Wcc { before, after })
    }

    fn may_change(&self) -> Outcome<()> {
        if self.options.read_only {
            Err(Status::ReadOnly)
        } else {
            Ok(())
        }
    }

    fn serve(&self, peer: SocketAddr, message: &[u8], item: Option<&Slice>) -> Result<Response, NoCall> {
        let (call, arguments) = Call::parse(message)?;
        tracing::trace!(%peer, program = call.program, procedure = call.procedure, xid = call.xid, "call");
        let refuse = |refusal| Ok(plain(rpc::refused(call.xid, refusal, 3)));
        let once = |duplicates: &Duplicates, most: usize, serve: &dyn Fn() -> Made| {
            let first = |octets: &'_ [u8]| octets.len().min(most);
            let data = item.map_or(&[][..], |item| item);
            let octets = (&message[..first(message)], &data[..first(data)]);
            Ok(plain(duplicates.once(peer.ip(), &call, octets, || {
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
                    return once(&self.duplicates, usize::MAX, &|| {
                        self.acl(&call, procedure, arguments)
                    });
                }
                Some(procedure) => self.acl(&call, procedure, arguments),
                None => return refuse(Refusal::NoProcedure),
            },
            (mount3::PROGRAM, mount3::VERSION) => match mount3::Procedure::of(call.procedure) {
                Some(procedure) => self.mount(&call, procedure, arguments, peer.ip()),
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

    fn nfs<'a>(
        &self,
        call: &Call,
        procedure: Procedure,
        mut arguments: Reader<'a>,
        item: Option<&'a Slice>,
    ) -> Made {
        let caller = &self.caller(&call.credential);
        let tree = &*self.tree;
        let args = &mut arguments;
        let mut reply = rpc::accepted(call.xid);
        let mut apart = None;
        let out = &mut reply;
        match procedure {
            Procedure::Null => {}
            Procedure::Getattr => {
                let file = Handle::take(args)?;
                answer(tree.attributes(&file), |status| (status, ()), out);
            }
            Procedure::Setattr => {
                let SetattrArgs {
                    file,
                    attributes,
                    guard,
                } = Xdr::take(args)?;
                let (done, wcc) =
                    self.around(&file, || tree.set_attributes(caller, &file, &attributes, guard));
                answer(done.map(|()| wcc), |status| (status, wcc), out);
            }
            Procedure::Lookup => {
                let Entry { dir, name } = Xdr::take(args)?;
                let named = match name {
                    b"." | b".." => Ok(()),
                    _ => check_name(name),
                };
                let found = named.and_then(|()| tree.lookup(caller, &dir, name));
                let dir = self.after(&dir);
                let found = found.map(|(file, attributes)| LookupOk {
                    file,
                    attributes: Some(attributes),
                    dir,
                });
                answer(found, |status| (status, dir), out);
            }
            Procedure::Access => {
                let AccessArgs { file, access } = Xdr::take(args)?;
                let read_only = if self.options.read_only { !0b1_1100 } else { !0 };
                let found = tree.access(caller, &file, access & read_only);
                let attributes = self.after(&file);
                let found = found.map(|access| AccessOk { attributes, access });
                answer(found, |status| (status, attributes), out);
            }
            Procedure::Readlink => {
                let file = Handle::take(args)?;
                let found = tree.read_link(&file).and_then(|text| {
                    let mut memory = tree.pool().take(text.len()).ok_or(Status::Jukebox)?;
                    memory.copy_from_slice(&text);
                    Ok(memory.share())
                });
                let attributes = self.after(&file);
                let found = found.map(|text| {
                    let len = text.len() as u32;
                    apart = Some(vec![text]);
                    ReadlinkOk { attributes, len }
                });
                answer(found, |status| (status, attributes), out);
            }
            Procedure::Read => {
                let ReadArgs { file, offset, count } = Xdr::take(args)?;
                let found = tree.read(caller, &file, offset, count.min(MAX_TRANSFER));
                let attributes = self.after(&file);
                let found = found.map(|Found { pieces, eof }| {
                    let len = pieces.iter().map(|piece| piece.len()).sum::<usize>() as u32;
                    apart = Some(pieces);
                    ReadOk {
                        attributes,
                        count: len,
                        eof,
                        len,
                    }
                });
                answer(found, |status| (status, attributes), out);
            }
            Procedure::Write => {
                let WriteArgs {
                    file,
                    offset,
                    count,
                    stable,
                    len,
                } = Xdr::take(args)?;
                let data = data(item, len, args)?;
                if len != count || len > MAX_TRANSFER {
                    return Err(BadXdr::Length(len));
                }
                let (done, wcc) = self.around(&file, || tree.write(caller, &file, offset, data, stable));
                let done = done.map(|(count, committed)| WriteOk {
                    wcc,
                    count,
                    committed,
                    verifier: self.verifier,
                });
                answer(done, |status| (status, wcc), out);
            }
            Procedure::Create => {
                let CreateArgs { place, how } = Xdr::take(args)?;
                self.make(place, out, || tree.create(caller, &place.dir, place.name, &how));
            }
            Procedure::Mkdir => {
                let MkdirArgs { place, attributes } = Xdr::take(args)?;
                let what = New::Directory(&attributes);
                self.make(place, out, || tree.make(caller, &place.dir, place.name, what));
            }
            Procedure::Symlink => {
                let SymlinkArgs {
                    place,
                    attributes,
                    len,
                } = Xdr::take(args)?;
                let text = data(item, len, args)?;
                let what = New::Symlink(text.octets(), &attributes);
                self.make(place, out, || match text.octets() {
                    text if text.len() > MAX_PATH => Err(Status::NameTooLong),
                    text if text.is_empty() || text.contains(&0) => Err(Status::Invalid),
                    _ => tree.make(caller, &place.dir, place.name, what),
                });
            }
            Procedure::Mknod => {
                let MknodArgs { place, what } = Xdr::take(args)?;
                self.make(place, out, || {
                    tree.make(caller, &place.dir, place.name, New::special(&what)?)
                });
            }
            Procedure::Remove | Procedure::Rmdir => {
                let Entry { dir, name } = Xdr::take(args)?;
                let directory = procedure == Procedure::Rmdir;
                let (done, wcc) = self.around(&dir, || {
                    check_name(name)?;
                    tree.remove(caller, &dir, name, directory)
                });
                answer(done.map(|()| wcc), |status| (status, wcc), out);
            }
            Procedure::Rename => {
                let RenameArgs { from, to } = Xdr::take(args)?;
                let before = self.before(&from.dir);
                let (done, to_wcc) = self.around(&to.dir, || {
                    check_name(from.name).and_then(|()| check_name(to.name))?;
                    tree.rename(caller, (&from.dir, from.name), (&to.dir, to.name))
                });
                let after = self.after(&from.dir);
                let both = (Wcc { before, after }, to_wcc);
                answer(done.map(|()| both), |status| (status, both), out);
            }
            Procedure::Link => {
                let LinkArgs { file, place } = Xdr::take(args)?;
                let (done, wcc) = self.around(&place.dir, || {
                    check_name(place.name)?;
                    tree.link(caller, &file, &place.dir, place.name)
                });
                let both = (self.after(&file), wcc);
                answer(done.map(|()| both), |status| (status, both), out);
            }
            Procedure::Readdir => {
                let ReaddirArgs {
                    dir, cookie, count, ..
                } = Xdr::take(args)?;
                let listing = self.listing(caller, &dir);
                let attributes = self.after(&dir);
                match listing {
                    Ok(listing) => {
                        self.list(&dir, attributes, &listing, cookie, (u32::MAX, count), None, out)
                    }
                    Err(status) => (status, attributes).put(out),
                }
            }
            Procedure::Readdirplus => {
                let ReaddirplusArgs {
                    dir,
                    cookie,
                    names,
                    count,
                    ..
                } = Xdr::take(args)?;
                let listing = self.listing(caller, &dir);
                let attributes = self.after(&dir);
                match listing {
                    Ok(listing) => self.list(
                        &dir,
                        attributes,
                        &listing,
                        cookie,
                        (names, count),
                        Some(caller),
                        out,
                    ),
                    Err(status) => (status, attributes).put(out),
                }
            }
            Procedure::Fsstat => {
                let file = Handle::take(args)?;
                let attributes = self.after(&file);
                let known = attributes.ok_or(Status::Stale).and_then(|_| tree.statistics());
                let found = known.map(|statistics| FsstatOk {
                    attributes,
                    statistics,
                });
                answer(found, |status| (status, attributes), out);
            }
            Procedure::Fsinfo => {
                let file = Handle::take(args)?;
                let attributes = self.after(&file);
                let found = attributes.ok_or(Status::Stale).map(|_| FsinfoOk {
                    attributes,
                    read_max: MAX_TRANSFER,
                    read_best: MAX_TRANSFER,
                    read_multiple: 4096,
                    write_max: MAX_TRANSFER,
                    write_best: MAX_TRANSFER,
                    write_multiple: 4096,
                    readdir_best: 64 << 10,
                    max_size: i64::MAX as u64,
                    time_delta: Time { seconds: 0, nanos: 1 },
                    properties: 1 | 2 | 8 | 16,
                });
                answer(found, |status| (status, attributes), out);
            }
            Procedure::Pathconf => {
                let file = Handle::take(args)?;
                let attributes = self.after(&file);
                let found = attributes.ok_or(Status::Stale).map(|_| PathconfOk {
                    attributes,
                    max_links: 32000,
                    max_name: MAX_NAME as u32,
                    no_trunc: true,
                    chown_restricted: true,
                    case_insensitive: false,
                    case_preserving: true,
                });
                answer(found, |status| (status, attributes), out);
            }
            Procedure::Commit => {
                let CommitArgs { file, .. } = Xdr::take(args)?;
                let (done, wcc) = self.around(&file, || tree.commit(caller, &file));
                let verifier = self.verifier;
                answer(
                    done.map(|()| CommitOk { wcc, verifier }),
                    |status| (status, wcc),
                    out,
                );
            }
        }
        Ok((reply, apart))
    }

    fn acl(&self, call: &Call, procedure: nfsacl::Procedure, mut arguments: Reader<'_>) -> Made {
        use nfsacl::Procedure as Acl;
        let mut reply = rpc::accepted(call.xid);
        let (args, out) = (&mut arguments, &mut reply);
        match procedure {
            Acl::Null => {}
            Acl::Getacl => {
                let GetaclArgs { file, mask } = Xdr::take(args)?;
                let found = nfsacl::check_mask(mask).and_then(|()| self.tree.acls(&file));
                let attributes = self.after(&file);
                let found = found.and_then(|acls| {
                    let is = attributes.ok_or(Status::Stale)?;
                    Ok((attributes, Lists::of(&acls, mask, is.uid, is.gid)?))
                });
                answer(found, |status| (status, attributes), out);
            }
            Acl::Setacl => {
                let (file, lists): SetaclArgs = Xdr::take(args)?;
                let change = self.may_change().and_then(|()| lists.change());
                let caller = self.caller(&call.credential);
                let set = change.and_then(|what| self.tree.set_acls(&caller, &file, &what));
                let attributes = self.after(&file);
                answer(set.map(|()| attributes), |status| (status, attributes), out);
            }
        }
        Ok((reply, None))
    }

    /// CREATE and its like.
    fn make(
        &self,
        place: Entry<'_>,
        out: &mut Vec<u8>,
        make: impl FnOnce() -> Outcome<(Handle, Attributes)>,
    ) {
        let (made, wcc) = self.around(&place.dir, || {
            check_name(place.name)?;
            make()
        });
        let made = made.map(|(file, attributes)| Created {
            file: Some(file),
            attributes: Some(attributes),
            wcc,
        });
        answer(made, |status| (status, wcc), out);
    }

    fn listing(&self, caller: &Caller, dir: &Handle) -> Outcome<std::sync::Arc<Listing>> {
        self.tree.may_list(caller, dir)?;
        self.listings.of(&*self.tree, dir)
    }

    /// Entries behind `cookie`, as many as fit: `limits` are bytes of names, and of all results. `plus`: with handles and attributes, as far
    /// as this caller may see them.
    #[allow(clippy::too_many_arguments)]
    fn list(
        &self,
        dir: &Handle,
        attributes: Option<Attributes>,
        listing: &Listing,
        cookie: u64,
        limits: (u32, u32),
        plus: Option<&Caller>,
        out: &mut Vec<u8>,
    ) {
        let begin = out.len();
        let verifier = [0; 8];
        let head = ReaddirOk {
            dir: attributes,
            verifier,
        };
        Reply::<_, ()>::Ok(head).put(out);
        let empty = out.len();
        let (names_max, all_max) = (limits.0 as usize, limits.1.min(MAX_LISTING) as usize);
        // The status does not count, but the words that end the list do.
        let end = begin + 4 + all_max.saturating_sub(8);
        let mut names = 0;
        let mut put =
            |entry: Listed<'_>, file: &mut dyn FnMut() -> Option<(Handle, Attributes)>, out: &mut Vec<u8>| {
                let before = out.len();
                true.put(out);
                match plus {
                    None => entry.put(out),
                    Some(_) => {
                        let found = file();
                        let (file, attributes) = (
                            found.map(|(file, _)| file),
                            found.map(|(_, attributes)| attributes),
                        );
                        ListedPlus {
                            entry,
                            attributes,
                            file,
                        }
                        .put(out);
                    }
                }
                names += 24 + entry.name.len() + crate::xdr::padding(entry.name.len());
                let fits = out.len() <= end && names <= names_max;
                if !fits {
                    out.truncate(before);
                }
                fits
            };
        let number = |file: Option<Attributes>| file.map_or(0, |attributes| attributes.fileid);
        let complete = 'all: {
            for (special, name) in [(SELF, &b"."[..]), (PARENT, &b".."[..])] {
                if cookie >= special {
                    continue;
                }
                let file = if special == SELF {
                    Ok(*dir)
                } else {
                    self.tree.parent(dir)
                };
                let found = file.ok().and_then(|file| Some((file, self.after(&file)?)));
                let fileid = number(found.map(|(_, attributes)| attributes));
                let entry = Listed {
                    fileid,
                    name,
                    cookie: special,
                };
                if !put(entry, &mut || found, out) {
                    break 'all false;
                }
            }
            for name in listing.after(cookie) {
                let entry = Listed {
                    fileid: name.fileid,
                    name: &name.name,
                    cookie: name.cookie,
                };
                let mut find = || self.tree.lookup(plus?, dir, &name.name).ok();
                if !put(entry, &mut find, out) {
                    break 'all false;
                }
            }
            true
        };
        if out.len() == empty && !complete {
            out.truncate(begin);
            return (Status::TooSmall, attributes).put(out);
        }
        (false, complete).put(out);
    }

    fn mount(
        &self,
        call: &Call,
        procedure: mount3::Procedure,
        mut arguments: Reader<'_>,
        peer: IpAddr,
    ) -> Made {
        use mount3::Procedure as Mount;
        let mut reply = rpc::accepted(call.xid);
        let mut mounts = lock(&self.mounts);
        let args = &mut arguments;
        match procedure {
            Mount::Null => {}
            Mount::Mnt => {
                let path = <&[u8]>::take(args)?;
                let found = self.walk(&self.caller(&call.credential), path);
                if found.is_ok() {
                    mounts.retain(|(host, at)| (*host, &at[..]) != (peer, path));
                    if mounts.len() == MOUNTS {
                        mounts.remove(0);
                    }
                    mounts.push((peer, path.to_vec()));
                }
                mount3::put_mnt(&found, &mut reply);
            }
            Mount::Dump => {
                for (host, path) in &*mounts {
                    (true, (host.to_string().as_bytes(), &path[..])).put(&mut reply);
                }
                false.put(&mut reply);
            }
            Mount::Umnt => {
                let path = <&[u8]>::take(args)?;
                mounts.retain(|(host, at)| (*host, &at[..]) != (peer, path));
            }
            Mount::Umntall => mounts.retain(|(host, _)| *host != peer),
            // One export, for everybody.
            Mount::Export => (true, (&b"/"[..], (false, false))).put(&mut reply),
        }
        Ok((reply, None))
    }

    /// The directory at a path, from the root of what is served. No link is followed.
    fn walk(&self, caller: &Caller, path: &[u8]) -> Result<Handle, mount3::Status> {
        use mount3::Status as Mount;
        if path.len() > mount3::MAX_PATH {
            return Err(Mount::NameTooLong);
        }
        let refusal = |status| match status {
            Status::NoEnt => Mount::NoEnt,
            Status::NotDir => Mount::NotDir,
            Status::Access | Status::Perm => Mount::Access,
            Status::NameTooLong => Mount::NameTooLong,
            Status::Invalid => Mount::Invalid,
            _ => Mount::Io,
        };
        let mut dir = self.tree.root();
        for name in path.split(|octet| *octet == b'/').filter(|name| !name.is_empty()) {
            check_name(name).map_err(refusal)?;
            let (below, attributes) = self.tree.lookup(caller, &dir, name).map_err(refusal)?;
            if attributes.kind != Kind::Directory {
                return Err(Mount::NotDir);
            }
            dir = below;
        }
        Ok(dir)
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

/// Those that must not be done twice. Twice in a row a WRITE might be; but not the second time behind another one, which its client sent when the
/// first was answered.
const fn once_only(procedure: Procedure) -> bool {
    use Procedure::{Create, Link, Mkdir, Mknod, Remove, Rename, Rmdir, Setattr, Symlink, Write};
    matches!(
        procedure,
        Setattr | Create | Mkdir | Symlink | Mknod | Remove | Rmdir | Rename | Link | Write
    )
}

/// Puts a result, or what comes with a failure.
fn answer<'a, T: Xdr<'a>, F: Xdr<'a>>(
    found: Outcome<T>,
    failure: impl FnOnce(Status) -> (Status, F),
    out: &mut Vec<u8>,
) {
    found.map_err(failure).put(out);
}

/// The item with which arguments end, wherever it is.
fn data<'a>(item: Option<&'a Slice>, len: u32, arguments: &mut Reader<'a>) -> Result<Data<'a>, BadXdr> {
    match item {
        Some(item) if item.len() == len as usize => Ok(Data::Apart(item)),
        Some(_) => Err(BadXdr::Length(len)),
        None => arguments.octets(len as usize).map(Data::Inline),
    }
}
