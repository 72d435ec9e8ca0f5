//! Registered memory: protection domains, STags, and the checks that guard every access (RFC 5041
//! §7.1, §8; RFC 5042).

mod backing;
mod borrows;
mod domains;
mod entry;
mod exports;
mod permutation;
mod registration;
mod room;
mod table;
#[cfg(test)]
mod tests;
mod violation;
mod window;

pub use backing::{Backing, Remote, WordError};
pub(crate) use borrows::{Borrow, BorrowHolder, Pin};
pub use domains::{DomainUse, Domains};
pub(crate) use entry::EntryId;
pub(crate) use exports::{Admission, Exports, ForeignTable, LastEntry, OwnGuard, Permitted};
pub use registration::{BindError, InvalidateBy, InvalidateError, Registration, TableError};
pub use room::{PageReservation, PageRoom, reserve};
pub use table::MemoryTable;
pub(crate) use table::explain::Asked;
pub use violation::{Need, Violation};
pub use window::{Recent, Window};
