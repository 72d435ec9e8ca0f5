//! Results of operations.

use crate::nfs3::{Attributes, Handle, Status};

/// The result of an operation.
pub type Outcome<T> = Result<T, Status>;

/// A file and its attributes.
pub type File = (Handle, Attributes);
