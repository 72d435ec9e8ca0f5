//! Linux's SCTP sockets (RFC 6458, linux/sctp.h): the options of those that carry DDP, and messages
//! with their stream and identifier in a control message.

use super::control::{Control, append, control_messages};
use super::{get, last_errno, set, set_bytes};
use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::Errno;
use urnic_sys::{Numbers, Plain, Unpadded};

// Of linux/sctp.h; not in libc yet.
const SCTP_EVENT: libc::c_int = 127;
const SCTP_REMOTE_UDP_ENCAPS_PORT: libc::c_int = 132;
const SCTP_ASSOC_CHANGE: u16 = 0x8001;
const SCTP_ADAPTATION_INDICATION: u16 = 0x8007;
const SCTP_RESTART: u16 = 2;
const SCTP_SHUTDOWN_COMP: u16 = 3;

/// Bytes of a `struct sockaddr_storage`: all zeroes mean every address of a peer.
const ANY_ADDRESS: [u8; 128] = [0; 128];

/// The times of a socket's associations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// The retransmission timeout before a round trip was measured, the least, and the most, in
    /// milliseconds.
    pub(crate) rto: [u32; 3],
    /// How often the first packet is repeated.
    pub(crate) requests: u16,
    /// After so many milliseconds without a packet the peer is asked for an answer.
    pub(crate) heartbeat: u32,
    /// An association ends after so many retransmissions and heartbeats without an answer.
    pub(crate) unanswered: u16,
}

/// Prepares a socket before it connects or listens: accepted sockets inherit all of it. Messages
/// are sent at once, and not fragmented; each has its stream, and the peer's adaptation layer is
/// reported.
pub(crate) fn prepare(
    socket: BorrowedFd<'_>,
    streams: u16,
    adaptation: u32,
    times: &Times,
) -> Result<(), Errno> {
    let option = |name, parts: &[&[u8]]| set_bytes(socket, libc::IPPROTO_SCTP, name, &parts.concat());
    let short = u16::to_ne_bytes;
    let long = u32::to_ne_bytes;
    let [initial, least, most] = times.rto;
    let longest_request = u16::try_from(most).unwrap_or(u16::MAX);
    option(
        libc::SCTP_INITMSG,
        &[
            &short(streams),
            &short(streams),
            &short(times.requests),
            &short(longest_request),
        ],
    )?;
    option(libc::SCTP_ADAPTATION_LAYER, &[&long(adaptation)])?;
    set(socket, libc::IPPROTO_SCTP, libc::SCTP_DISABLE_FRAGMENTS, 1)?;
    set(socket, libc::IPPROTO_SCTP, libc::SCTP_NODELAY, 1)?;
    set(socket, libc::IPPROTO_SCTP, libc::SCTP_RECVRCVINFO, 1)?;
    for event in [SCTP_ASSOC_CHANGE, SCTP_ADAPTATION_INDICATION] {
        option(SCTP_EVENT, &[&[0; 4], &short(event), &[1, 0]])?;
    }
    let rto = [&[0; 4], &long(initial)[..], &long(most), &long(least)];
    option(libc::SCTP_RTOINFO, &rto)?;
    // struct sctp_assocparams: what is 0 is not changed.
    let retransmissions = [&[0; 4], &short(times.unanswered)[..], &[0; 14]];
    option(libc::SCTP_ASSOCINFO, &retransmissions)?;
    // struct sctp_paddrparams, without its last two members: those of a path are fewer, so that the
    // limit of the association counts.
    const SPP_HB_ENABLE: u32 = 1;
    let path = [
        &[0; 4],
        &ANY_ADDRESS[..],
        &long(times.heartbeat),
        &short(times.unanswered),
        &[0; 8],
        &long(SPP_HB_ENABLE),
        &[0; 2],
    ];
    option(libc::SCTP_PEER_ADDR_PARAMS, &path)
}

/// Puts the packets of the next association into UDP datagrams to this port of the peer (RFC 6951).
///
/// # Errors
/// `ENOPROTOOPT`: the kernel is older than Linux 5.11.
pub(crate) fn encapsulate(socket: BorrowedFd<'_>, port: u16) -> Result<(), Errno> {
    // struct sctp_udpencaps: the address is aligned as a pointer is.
    const PADDING: usize = size_of::<usize>() - 4;
    let option = [
        &[0; 4][..],
        &[0; PADDING],
        &ANY_ADDRESS,
        &port.to_be_bytes(),
        &[0; 2],
        &[0; PADDING],
    ];
    let option = option.concat();
    set_bytes(socket, libc::IPPROTO_SCTP, SCTP_REMOTE_UDP_ENCAPS_PORT, &option)
}

/// Lets messages be fragmented that are longer than the path permits.
pub(crate) fn permit_fragments(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    set(socket, libc::IPPROTO_SCTP, libc::SCTP_DISABLE_FRAGMENTS, 0)
}

/// What both ends of an association have agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Agreed {
    /// Streams, of the direction that has fewer.
    pub(crate) streams: u16,
    /// The longest message that is not fragmented at present.
    pub(crate) longest: u32,
    /// The scope of the peer's address, if that is one of IPv6: accept(2) does not tell it.
    pub(crate) scope: u32,
}

/// `SCTP_STATUS` of an established association.
///
/// # Errors
/// `EINVAL`: there is none.
pub(crate) fn agreed(socket: BorrowedFd<'_>) -> Result<Agreed, Errno> {
    /// Half-words of a `struct sctp_status`, and those of its members that are used.
    const LEN: usize = 88;
    const STREAMS: [usize; 2] = [8, 9];
    const FRAGMENTATION_POINT: usize = 5;
    /// `sin6_scope_id` of the address of `sstat_primary`.
    const SCOPE: usize = 13;
    let (words, _) = get(socket, libc::IPPROTO_SCTP, libc::SCTP_STATUS, [0u32; LEN / 2])?;
    let half = |index: usize| {
        let [a, b, c, d] = words[index / 2].to_ne_bytes();
        u16::from_ne_bytes(if index.is_multiple_of(2) { [a, b] } else { [c, d] })
    };
    Ok(Agreed {
        streams: half(STREAMS[0]).min(half(STREAMS[1])),
        longest: words[FRAGMENTATION_POINT],
        scope: words[SCOPE],
    })
}

/// The memory of messages that the peer has not acknowledged: more bytes than they have, and 0 if
/// there are none.
pub(crate) fn unacknowledged_memory(socket: BorrowedFd<'_>) -> Result<usize, Errno> {
    // linux/sock_diag.h: indices of SO_MEMINFO's array, of nine.
    const SK_MEMINFO_WMEM_QUEUED: usize = 5;
    let (values, _) = get(socket, libc::SOL_SOCKET, libc::SO_MEMINFO, [0u32; 9])?;
    Ok(values[SK_MEMINFO_WMEM_QUEUED] as usize)
}

/// Where a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Destination {
    /// The stream.
    pub(crate) stream: u16,
    /// The payload protocol identifier.
    pub(crate) ppid: u32,
    /// The peer is to acknowledge it without a delay (RFC 7053).
    pub(crate) at_once: bool,
}

/// Sends a message, unordered and whole.
///
/// # Errors
/// `EAGAIN`: no room; `EMSGSIZE`: it would be fragmented; those of sendmsg(2).
pub(crate) fn send(socket: BorrowedFd<'_>, to: Destination, message: &[u8]) -> Result<(), Errno> {
    let at_once = if to.at_once {
        libc::SCTP_SACK_IMMEDIATELY
    } else {
        0
    };
    let mut info = libc::sctp_sndinfo::zeroes();
    info.snd_sid = to.stream;
    info.snd_flags = (libc::SCTP_UNORDERED | at_once) as u16;
    info.snd_ppid = to.ppid.to_be();
    let mut control = Control::EMPTY;
    let control_len = append(
        &mut control,
        0,
        libc::IPPROTO_SCTP,
        libc::SCTP_SNDINFO,
        info.as_bytes(),
    );
    let mut extent = libc::iovec {
        iov_base: message.as_ptr().cast_mut().cast(),
        iov_len: message.len(),
    };
    let mut header = libc::msghdr::zeroes();
    (header.msg_iov, header.msg_iovlen) = (&raw mut extent, 1);
    (header.msg_control, header.msg_controllen) = (control.0.as_mut_ptr().cast(), control_len as _);
    // SAFETY: the header points to live memory of the lengths given, which is only read.
    let done = unsafe {
        libc::syscall(
            libc::SYS_sendmsg,
            socket.as_raw_fd(),
            &raw mut header,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    if done < 0 { Err(last_errno()) } else { Ok(()) }
}

/// What a socket gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrived {
    /// A message of this many bytes, in the buffer.
    Message {
        /// Its number of bytes.
        len: usize,
        /// The stream.
        stream: u16,
        /// The payload protocol identifier.
        ppid: u32,
        /// Whether it was sent unordered.
        unordered: bool,
    },
    /// A message that is longer than the buffer, or of which SCTP gives only a part, or without its
    /// stream.
    Unusable,
    /// A change of the association.
    Notification(Notification),
    /// The peer has ended the association in order.
    End,
}

/// A change of an association.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Notification {
    /// The peer's adaptation layer.
    Adaptation(u32),
    /// The peer has begun the association anew, and knows nothing of the old one.
    Restarted,
    /// The association has ended in order, as this end wanted: nothing else tells of it.
    Ended,
    /// Another one.
    Other,
}

/// Takes a message, or what has happened to the association.
///
/// # Errors
/// `EAGAIN` when there is nothing; the reason of the association's end.
pub(crate) fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Arrived, Errno> {
    let mut control = Control::EMPTY;
    let mut extent = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let mut header = libc::msghdr::zeroes();
    (header.msg_iov, header.msg_iovlen) = (&raw mut extent, 1);
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = control.0.len() as _;
    // SAFETY: the header points to live memory of the lengths given, which nothing else accesses
    // during the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_recvmsg,
            socket.as_raw_fd(),
            &raw mut header,
            libc::MSG_DONTWAIT,
        )
    };
    let len = usize::try_from(done).map_err(|_| last_errno())?;
    let control = control.0.get(..header.msg_controllen as _).unwrap_or_default();
    let bytes = buffer.get(..len).unwrap_or_default();
    Ok(arrived(bytes, control, header.msg_flags))
}

/// What recvmsg(2) has returned: bytes, control messages and flags.
fn arrived(bytes: &[u8], control: &[u8], flags: libc::c_int) -> Arrived {
    if bytes.is_empty() {
        return Arrived::End;
    }
    let is_notification = flags & libc::MSG_NOTIFICATION != 0;
    if flags & libc::MSG_EOR == 0 {
        // One that has no room is of no kind that is known here.
        return match is_notification {
            true => Arrived::Notification(Notification::Other),
            false => Arrived::Unusable,
        };
    }
    if is_notification {
        return Arrived::Notification(notification(bytes));
    }
    let info = control_messages(control).find_map(|message| match message {
        (libc::IPPROTO_SCTP, libc::SCTP_RCVINFO, value) => libc::sctp_rcvinfo::parse(value),
        _ => None,
    });
    info.map_or(Arrived::Unusable, |info| Arrived::Message {
        len: bytes.len(),
        stream: info.rcv_sid,
        ppid: u32::from_be(info.rcv_ppid),
        unordered: libc::c_int::from(info.rcv_flags) & libc::SCTP_UNORDERED != 0,
    })
}

/// Reads a notification: its type, flags and length, and then the members of its type.
fn notification(bytes: &[u8]) -> Notification {
    const HEADER_LEN: usize = 8;
    let kind = bytes.first_chunk().map(|kind| u16::from_ne_bytes(*kind));
    let members = bytes.get(HEADER_LEN..).unwrap_or_default();
    let state = members.first_chunk().map(|state| u16::from_ne_bytes(*state));
    let code = members.first_chunk().map(|code| u32::from_ne_bytes(*code));
    match (kind, state, code) {
        (Some(SCTP_ADAPTATION_INDICATION), _, Some(code)) => Notification::Adaptation(code),
        (Some(SCTP_ASSOC_CHANGE), Some(SCTP_RESTART), _) => Notification::Restarted,
        (Some(SCTP_ASSOC_CHANGE), Some(SCTP_SHUTDOWN_COMP), _) => Notification::Ended,
        _ => Notification::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: libc::c_int = libc::MSG_EOR;
    const EVENT: libc::c_int = libc::MSG_EOR | libc::MSG_NOTIFICATION;

    /// The control message of a message on stream 7, of session control: linux/sctp.h's struct
    /// sctp_rcvinfo.
    fn control(flags: libc::c_int) -> Vec<u8> {
        let flags = (flags as u16).to_ne_bytes();
        let info = [
            &7u16.to_ne_bytes()[..],
            &[0; 2],
            &flags,
            &[0; 2],
            &[0, 0, 0, 17],
            &[0; 16],
        ]
        .concat();
        let mut control = Control::EMPTY;
        let len = append(&mut control, 0, libc::IPPROTO_SCTP, libc::SCTP_RCVINFO, &info);
        control.0[..len].to_vec()
    }

    #[test]
    fn a_message_has_its_stream_and_identifier() {
        let message = |unordered| Arrived::Message {
            len: 3,
            stream: 7,
            ppid: 17,
            unordered,
        };
        let unordered = control(libc::SCTP_UNORDERED);
        assert_eq!(arrived(b"abc", &unordered, WHOLE), message(true));
        assert_eq!(arrived(b"abc", &control(0), WHOLE), message(false));
        // In parts, or without the control message, or with a part of it.
        assert_eq!(arrived(b"abc", &unordered, 0), Arrived::Unusable);
        for len in [0, 8, unordered.len() - 8] {
            assert_eq!(arrived(b"abc", &unordered[..len], WHOLE), Arrived::Unusable);
        }
        assert_eq!(arrived(b"", &[], WHOLE), Arrived::End);
    }

    #[test]
    fn a_notification_is_read_by_its_type() {
        let notification = |kind: u16, members: &[u8]| {
            let bytes = [&kind.to_ne_bytes()[..], &[0; 6], members].concat();
            arrived(&bytes, &[], EVENT)
        };
        let is = |expected| Arrived::Notification(expected);
        let code = 1u32.to_ne_bytes();
        let adaptation = notification(SCTP_ADAPTATION_INDICATION, &[&code[..], &[0; 4]].concat());
        assert_eq!(adaptation, is(Notification::Adaptation(1)));
        let changed =
            |state: u16| notification(SCTP_ASSOC_CHANGE, &[&state.to_ne_bytes()[..], &[0; 10]].concat());
        assert_eq!(changed(SCTP_RESTART), is(Notification::Restarted));
        assert_eq!(changed(SCTP_SHUTDOWN_COMP), is(Notification::Ended));
        assert_eq!(changed(0), is(Notification::Other));
        // Others, those that are cut, and those without their members.
        assert_eq!(notification(0x8003, &code), is(Notification::Other));
        assert_eq!(
            notification(SCTP_ADAPTATION_INDICATION, &[0; 3]),
            is(Notification::Other)
        );
        assert_eq!(
            arrived(&[1], &[], libc::MSG_NOTIFICATION),
            is(Notification::Other)
        );
        assert_eq!(arrived(&[1], &[], EVENT), is(Notification::Other));
    }
}
