//! Time, which the owner of a stream provides.

use std::time::Duration;

/// The time since an arbitrary epoch.
pub type Time = Duration;
