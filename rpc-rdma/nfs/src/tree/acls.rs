//! Access control lists of files.

use crate::acl::Acl;

/// A file's access control lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acls {
    /// The access list. Its [`mode`](Acl::mode) is the mode of the file.
    pub access: Acl,
    /// The default list of a directory, which new files in it inherit.
    pub default: Option<Acl>,
}

/// A change of a file's access control lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetAcls {
    /// The new access list. `Some(None)` removes the list, so that the mode alone decides.
    pub access: Option<Option<Acl>>,
    /// The new default list. `Some(None)` removes the list.
    pub default: Option<Option<Acl>>,
}
