//! The messages of a RoCE NIC's connection manager, as its programs know them: the private data
//! that each carries, and the reasons of a rejection.
//!
//! The wire is MPA, but a program for a RoCE NIC cannot distinguish it: it gets the private data of
//! a management datagram, which has a fixed length, and the reasons of InfiniBand.

use rustix::io::Errno;
use urnic_config::Identity;

use super::CmEvent;

/// `IB_CM_REJ_INVALID_SERVICE_ID` (IBTA vol. 1 §12.6.7.2): no program listens at the port.
const REJECTED_SERVICE: i32 = 8;
/// `IB_CM_REJ_CONSUMER_DEFINED`: the peer's program rejected the request, or ended without an
/// answer.
pub(super) const REJECTED_BY_PROGRAM: i32 = 28;

/// A message of the connection manager with private data of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Message {
    /// REQ.
    Request,
    /// REP.
    Reply,
    /// REJ.
    Reject,
}

impl Message {
    /// Bytes of a program's private data in the message (IBTA vol. 1 §12.6). Of those of a REQ, 36
    /// are the addresses of rdma_cm.
    const fn room(self) -> usize {
        match self {
            Message::Request => 92 - 36,
            Message::Reply => 196,
            Message::Reject => 148,
        }
    }

    /// Fills the private data up with zeros, as a program for a RoCE NIC gets it. More than such a
    /// NIC carries is from a program of an RNIC, and stays.
    pub(super) fn pad(self, private_data: &mut Vec<u8>) {
        let len = private_data.len().max(self.room());
        private_data.resize(len, 0);
    }

    /// Checks private data that a program gives.
    ///
    /// # Errors
    /// `EINVAL` for more than the message carries. MPA carries all that a command can have.
    pub(super) fn check(self, identity: Identity, private_data: &[u8]) -> Result<(), Errno> {
        match identity.is_roce() && private_data.len() > self.room() {
            true => Err(Errno::INVAL),
            false => Ok(()),
        }
    }
}

/// The event of a connection attempt that failed, and its status. `known_peer`: the peer is urnic.
pub(super) fn outcome(identity: Identity, errno: Errno, known_peer: bool) -> (CmEvent, i32) {
    let status = -errno.raw_os_error();
    if !identity.is_roce() {
        // As `cma_iw_handler` of the kernel.
        return match errno {
            Errno::CONNREFUSED | Errno::CONNRESET => (CmEvent::Rejected, status),
            Errno::TIMEDOUT => (CmEvent::Unreachable, status),
            _ => (CmEvent::ConnectError, status),
        };
    }
    match errno {
        Errno::CONNRESET if known_peer => (CmEvent::Rejected, REJECTED_BY_PROGRAM),
        // Another service than rdma_cm has the TCP port, or nothing has it.
        Errno::CONNREFUSED | Errno::CONNRESET | Errno::PROTO if !known_peer => {
            (CmEvent::Rejected, REJECTED_SERVICE)
        }
        Errno::CONNREFUSED => (CmEvent::Rejected, REJECTED_SERVICE),
        // Datagrams that do not arrive are repeated until the time is over.
        Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::ACCESS | Errno::PERM => {
            (CmEvent::Unreachable, -Errno::TIMEDOUT.raw_os_error())
        }
        _ => (CmEvent::ConnectError, status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_data_fills_the_message() {
        let mut short = vec![1, 2];
        Message::Request.pad(&mut short);
        assert_eq!((short.len(), &short[..3]), (56, &[1, 2, 0][..]));
        let mut long = vec![7; 200];
        Message::Reject.pad(&mut long);
        assert_eq!(long, [7; 200], "a program of an RNIC may send more");
    }

    #[test]
    fn a_message_of_a_roce_nic_has_limited_room() {
        for (message, room) in [
            (Message::Request, 56),
            (Message::Reply, 196),
            (Message::Reject, 148),
        ] {
            let at = |identity, len| message.check(identity, &vec![0; len]);
            assert_eq!(at(Identity::Roce, room), Ok(()));
            assert_eq!(at(Identity::Roce, room + 1), Err(Errno::INVAL));
            assert_eq!(at(Identity::Iwarp, 255), Ok(()));
        }
    }

    #[test]
    fn a_failed_attempt_has_the_event_of_the_device() {
        let timeout = -Errno::TIMEDOUT.raw_os_error();
        for (errno, known, roce, iwarp) in [
            (
                Errno::CONNREFUSED,
                false,
                (CmEvent::Rejected, 8),
                CmEvent::Rejected,
            ),
            (
                Errno::CONNREFUSED,
                true,
                (CmEvent::Rejected, 8),
                CmEvent::Rejected,
            ),
            (Errno::CONNRESET, false, (CmEvent::Rejected, 8), CmEvent::Rejected),
            (Errno::CONNRESET, true, (CmEvent::Rejected, 28), CmEvent::Rejected),
            (Errno::PROTO, false, (CmEvent::Rejected, 8), CmEvent::ConnectError),
            (
                Errno::TIMEDOUT,
                false,
                (CmEvent::Unreachable, timeout),
                CmEvent::Unreachable,
            ),
            (
                Errno::HOSTUNREACH,
                true,
                (CmEvent::Unreachable, timeout),
                CmEvent::ConnectError,
            ),
            (
                Errno::PROTO,
                true,
                (CmEvent::ConnectError, -Errno::PROTO.raw_os_error()),
                CmEvent::ConnectError,
            ),
        ] {
            assert_eq!(outcome(Identity::Roce, errno, known), roce, "{errno}");
            let expected = (iwarp, -errno.raw_os_error());
            assert_eq!(outcome(Identity::Iwarp, errno, known), expected, "{errno}");
        }
    }
}
