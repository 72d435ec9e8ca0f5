//! The served tree, and the common parts of all procedures: identities, attributes around a change,
//! replies.

use crate::memory::Slice;
use crate::nfs3::{Attributes, Before, Handle, Reply, Status, Verifier, Wcc};
use crate::rpc::Credential;
use crate::tree::{Caller, Data, Listings, Outcome, Tree};
use crate::xdr::{BadXdr, Reader};
use std::time::{SystemTime, UNIX_EPOCH};

/// User and group of clients without an identity, by convention.
const NOBODY: u32 = 65534;

/// Options of the server.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Refuse all changes.
    pub read_only: bool,
    /// Do not map the clients' root to nobody.
    pub trust_root: bool,
}

/// A reply, and data that follows it.
pub(super) type Made = Result<(Vec<u8>, Option<Vec<Slice>>), BadXdr>;

/// A tree, with the options that apply to clients.
pub(super) struct Export {
    pub(super) tree: Box<dyn Tree>,
    pub(super) options: Options,
    pub(super) listings: Listings,
    /// The verifier differs for each process, because a process that ended may have lost
    /// uncommitted data.
    pub(super) verifier: Verifier,
}

impl Export {
    pub(super) fn new(tree: Box<dyn Tree>, options: Options) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let verifier = (now.as_nanos() as u64) ^ u64::from(std::process::id()).rotate_right(16);
        Self {
            tree,
            options,
            listings: Listings::default(),
            verifier: verifier.to_be_bytes(),
        }
    }

    /// The identity with which the tree checks a call. Root is mapped to nobody unless the options
    /// trust it.
    pub(super) fn caller(&self, credential: &Credential) -> Caller {
        let (uid, gid, groups) = match credential {
            Credential::Anonymous => (NOBODY, NOBODY, Vec::new()),
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

    /// Attributes of a file for post_op_attr.
    pub(super) fn after(&self, file: &Handle) -> Option<Attributes> {
        self.tree.attributes(file).ok()
    }

    /// Attributes of a file for pre_op_attr.
    pub(super) fn before(&self, file: &Handle) -> Option<Before> {
        self.after(file).map(|attributes| attributes.before())
    }

    /// Executes `change`, and takes the attributes of `file` before and after it.
    pub(super) fn around<T>(&self, file: &Handle, change: impl FnOnce() -> Outcome<T>) -> (Outcome<T>, Wcc) {
        let before = self.before(file);
        let done = self.may_change().and_then(|()| change());
        let after = self.after(file);
        (done, Wcc { before, after })
    }

    /// Fails if the export is read-only.
    pub(super) fn may_change(&self) -> Outcome<()> {
        if self.options.read_only {
            Err(Status::ReadOnly)
        } else {
            Ok(())
        }
    }
}

/// The reply to a change: the same attributes, whether it succeeded or not.
pub(super) fn with<T: Copy>(done: Outcome<()>, attributes: T) -> Reply<T, T> {
    done.map(|()| attributes).map_err(|status| (status, attributes))
}

/// The item at the end of the arguments: received apart from the message, or inline.
pub(super) fn data<'a>(
    item: Option<&'a Slice>,
    len: u32,
    arguments: &mut Reader<'a>,
) -> Result<Data<'a>, BadXdr> {
    match item {
        Some(item) if item.len() == len as usize => Ok(Data::Apart(item)),
        Some(_) => Err(BadXdr::Length(len)),
        None => arguments.bytes(len as usize).map(Data::Inline),
    }
}
