//! Refusals: the error number that a verb returns, and the argument at fault. The reason is a value
//! until the verb returns; only then it becomes a line of the log, and part of the snapshot.

use std::fmt;
use std::net::IpAddr;
use std::sync::OnceLock;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use urnic_cm::qp_attr::QpMask;
use urnic_device::vocabulary::QpState;

/// An error of a verb.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// The error number for the program.
    pub errno: Errno,
    /// The argument at fault; `None` if the error number says all that is known.
    pub reason: Option<Reason>,
    /// The new state, if the call changes the state of a queue pair.
    pub to: Option<QpState>,
}

/// Why a verb is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// A number is larger than the device, or the object, permits.
    Above {
        /// The argument, by its name in verbs.
        argument: &'static str,
        /// The given value.
        given: u64,
        /// The largest value.
        most: u64,
    },
    /// A number is larger than the object was created for.
    Exceeds {
        /// The argument, by its name in verbs.
        argument: &'static str,
        /// The given value.
        given: u64,
        /// The limit, by its name in verbs.
        limit: &'static str,
        /// The largest value.
        most: u64,
    },
    /// A queue pair in this state takes no requests.
    PostsNothing(QpState),
    /// A queue pair has no requests of this opcode with these flags.
    NoSuchRequest {
        /// `opcode` of the request.
        opcode: u32,
        /// `send_flags` of the request.
        flags: u32,
        /// `num_sge` of the request.
        elements: u32,
    },
    /// An argument has a value that is not valid.
    Invalid {
        /// The argument, by its name in verbs.
        argument: &'static str,
        /// The given value.
        given: u64,
        /// The values that are valid.
        valid: &'static str,
    },
    /// Bits of a mask or of flags are unknown, or not supported here.
    Bits {
        /// The argument, by its name in verbs.
        argument: &'static str,
        /// The bits at fault.
        bits: u64,
    },
    /// One right needs another one.
    Needs {
        /// The given right.
        given: &'static str,
        /// The right without which it is not valid.
        missing: &'static str,
    },
    /// A signed number is negative.
    Negative(&'static str),
    /// The argument is null.
    Null(&'static str),
    /// The handle in the object's structure is not the one that it was given.
    ChangedHandle,
    /// The object was created in another context.
    OtherContext,
    /// The object cannot be destroyed: objects of this kind use it.
    UsedBy(&'static str),
    /// A change of a queue pair lacks these attributes.
    Missing(QpMask),
    /// A change of a queue pair has attributes that it does not permit.
    Superfluous {
        /// The state before the change.
        from: QpState,
        /// The state after the change.
        to: QpState,
        /// The attributes at fault.
        attributes: QpMask,
    },
    /// A queue pair has no such transition.
    NoTransition {
        /// The state before the change.
        from: QpState,
        /// The state after the change.
        to: QpState,
    },
    /// `cur_qp_state` is not the state of the queue pair.
    OtherState {
        /// The state of the queue pair.
        is: QpState,
        /// The number in `cur_qp_state`.
        given: u32,
    },
    /// The host has no route to the address of `grh.dgid`, or no answer from it.
    Unreachable {
        /// The address.
        to: IpAddr,
        /// `grh.sgid_index`.
        sgid_index: u8,
    },
    /// The device has no queue pairs of this type: `UD`, `UC` of an RNIC.
    OnlyRoce(&'static str),
    /// Another rule, as a sentence.
    Rule(&'static str),
    /// A plan of faults lets the call fail.
    Planned,
}

impl Refusal {
    /// The device could not open the port of RoCE v2 for a queue pair.
    pub(crate) fn of_roce_port(errno: Errno) -> Refusal {
        match errno {
            Errno::ADDRINUSE => {
                Reason::Rule("another process, rdma_rxe or an adapter has UDP port 4791 (wire=roce)")
                    .with(errno)
            }
            errno => errno.into(),
        }
    }
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Refusal {
        Refusal {
            errno,
            reason: None,
            to: None,
        }
    }
}

impl fmt::Display for Refusal {
    /// Writes the reason, and the name of the error number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = self.errno.raw_os_error();
        match self.reason {
            Some(reason) => write!(f, "{reason}")?,
            None => f.write_str(&description(number))?,
        }
        match urnic_sys::errno::name(number) {
            Some(name) => write!(f, " ({name})"),
            None => write!(f, " (errno {number})"),
        }
    }
}

/// What libc says of an error number: "Cannot allocate memory".
fn description(number: i32) -> String {
    let text = std::io::Error::from_raw_os_error(number).to_string();
    match text.split_once(" (os error") {
        Some((text, _)) => text.to_owned(),
        None => text,
    }
}

impl Reason {
    /// The refusal with this error number.
    pub const fn with(self, errno: Errno) -> Refusal {
        Refusal {
            errno,
            reason: Some(self),
            to: None,
        }
    }

    /// The refusal with `EINVAL`.
    pub const fn invalid(self) -> Refusal {
        self.with(Errno::INVAL)
    }

    /// Whether programs ask for this on purpose, to find out what a device supports. No attribute
    /// of a device says how long inline data may be, so programs try longer and longer ones
    /// (libfabric).
    pub fn is_probe(&self) -> bool {
        matches!(
            self,
            Reason::Above {
                argument: MAX_INLINE,
                ..
            } | Reason::Planned
        )
    }
}

/// The name of the limit that programs find by trying.
pub const MAX_INLINE: &str = "max_inline_data";

/// `Ok` if `given` is no more than `most`.
///
/// # Errors
/// `EINVAL`, naming the argument.
pub fn at_most(argument: &'static str, given: u64, most: u64) -> Result<(), Refusal> {
    match given <= most {
        true => Ok(()),
        false => Err(Reason::Above {
            argument,
            given,
            most,
        }
        .invalid()),
    }
}

/// The refusal to destroy an object that objects of this kind use; or another error.
pub(crate) fn used_by(objects: &'static str, errno: Errno) -> Refusal {
    match errno {
        Errno::BUSY => Reason::UsedBy(objects).with(errno),
        errno => errno.into(),
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Reason::Above {
                argument,
                given,
                most,
            } => write!(f, "{argument} {given}, the device has {most}"),
            Reason::Exceeds {
                argument,
                given,
                limit,
                most,
            } => write!(f, "{argument} {given}, {limit} is {most}"),
            Reason::PostsNothing(state) => {
                write!(f, "nothing can be posted in state {}", state.verbs_name())
            }
            Reason::NoSuchRequest {
                opcode,
                flags,
                elements,
            } => write!(
                f,
                "the queue pair has no requests of opcode {opcode} with send_flags {flags:#x} and {elements} elements"
            ),
            Reason::Invalid {
                argument,
                given,
                valid,
            } => write!(f, "{argument} is {given}: {valid}"),
            Reason::Bits { argument, bits } => {
                write!(
                    f,
                    "{argument} has bits that are unknown or unsupported: {bits:#x}"
                )
            }
            Reason::Needs { given, missing } => write!(f, "{given} needs {missing}"),
            Reason::Negative(argument) => write!(f, "{argument} is negative"),
            Reason::Null(argument) => write!(f, "{argument} is missing"),
            Reason::Unreachable { to, sgid_index } => {
                write!(
                    f,
                    "grh.dgid {to} is not reached from the GID at grh.sgid_index {sgid_index}"
                )
            }
            Reason::ChangedHandle => f.write_str("the handle of the object was changed"),
            Reason::OtherContext => f.write_str("the object belongs to another context"),
            Reason::UsedBy(objects) => write!(f, "{objects} still use it"),
            Reason::Missing(attributes) => {
                let verb = if attributes.iter().count() > 1 {
                    "are"
                } else {
                    "is"
                };
                write!(f, "{} {verb} missing", names(attributes))
            }
            Reason::Superfluous { from, to, attributes } => {
                let (from, to) = (from.verbs_name(), to.verbs_name());
                write!(f, "{} cannot be set from {from} to {to}", names(attributes))
            }
            Reason::NoTransition { from, to } => {
                let (from, to) = (from.verbs_name(), to.verbs_name());
                write!(f, "there is no transition from {from} to {to}")
            }
            Reason::OtherState { is, given } => {
                let given = QpState::from_raw(given).map_or("no state", QpState::verbs_name);
                write!(
                    f,
                    "cur_qp_state is {given}, the queue pair is in {}",
                    is.verbs_name()
                )
            }
            Reason::OnlyRoce(kind) => write!(f, "iWARP has no {kind} queue pairs: --identity roce"),
            Reason::Rule(rule) => f.write_str(rule),
            Reason::Planned => f.write_str("a planned fault"),
        }
    }
}

/// The attributes, by their names in verbs.
fn names(attributes: QpMask) -> String {
    let names = attributes.iter_names().map(|(name, _)| format!("IBV_QP_{name}"));
    names.collect::<Vec<_>>().join(", ")
}

/// A refused call, as the log, the report and the snapshot show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// The verb, such as `ibv_create_qp`.
    pub verb: String,
    /// The verb, the argument at fault and the error number.
    pub text: String,
    /// The name of the error number.
    pub errno: String,
    /// The functions of the program that called the verb, innermost first.
    pub backtrace: Vec<String>,
    /// The number of refused calls of the verb from this place.
    pub count: u64,
}

/// What returns the last refused call of this process.
static LAST: OnceLock<fn() -> Option<Refused>> = OnceLock::new();

/// Sets what returns the last refused call of this process, for snapshots.
pub fn set_last_refused(last: fn() -> Option<Refused>) {
    let _ = LAST.set(last);
}

/// The last refused call of this process.
pub(crate) fn last_refused() -> Option<Refused> {
    LAST.get().and_then(|last| last())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_names_the_argument() {
        let texts = [
            (
                at_most("max_send_sge", 100, 32).unwrap_err().reason,
                "max_send_sge 100, the device has 32",
            ),
            (
                Some(Reason::Missing(QpMask::MIN_RNR_TIMER)),
                "IBV_QP_MIN_RNR_TIMER is missing",
            ),
            (
                Some(Reason::Missing(QpMask::AV | QpMask::RQ_PSN)),
                "IBV_QP_AV, IBV_QP_RQ_PSN are missing",
            ),
            (
                Some(Reason::Needs {
                    given: "REMOTE_WRITE",
                    missing: "LOCAL_WRITE",
                }),
                "REMOTE_WRITE needs LOCAL_WRITE",
            ),
            (
                Some(Reason::OnlyRoce("UD")),
                "iWARP has no UD queue pairs: --identity roce",
            ),
        ];
        for (reason, text) in texts {
            assert_eq!(reason.unwrap().to_string(), text);
        }
    }
}
