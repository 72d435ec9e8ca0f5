//! The result of a check.

/// Why a check did not pass.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The device deviates from the datasheet.
    Failed(String),
    /// The check does not apply to this device.
    NotHere(String),
}

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

/// Fails the check unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::outcome::Failure::Failed(format!($($message)+)));
        }
    };
}
pub(crate) use ensure;
