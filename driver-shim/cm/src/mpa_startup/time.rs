//! Time, which the owner of a stream hands in.

use std::time::Duration;

/// Time as the state machines see it: since an epoch that means nothing.
pub type Time = Duration;
