//! Registered memory: protection domains, STags, and the checks that guard every access (RFC 5041
//! §7.1, §8; RFC 5042).

mod backing;
mod borrows;
mod domains;
mod entry;
mod permutation;
mod remote_access;
mod table;
#[cfg(test)]
mod tests;
mod window;

pub use backing::{Backing, Remote, WordError};
pub use backing::{PageReservation, PageRoom, reserve};
pub(crate) use borrows::{Borrow, BorrowHolder, Pin};
pub use domains::{DomainUse, Domains};
pub(crate) use entry::EntryId;
pub use entry::{Accessor, MemoryAccess, Need, Violation};
pub use entry::{BindError, Invalidable, InvalidateBy, InvalidateError, Registration, TableError};
pub(crate) use remote_access::{
    Admission, ForeignTable, LastEntry, OwnHazardFlag, Permitted, RemoteAccessTable,
};
pub use table::MemoryTable;
pub use window::{Recent, Window};
