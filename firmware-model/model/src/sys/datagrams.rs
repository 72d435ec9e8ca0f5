//! Datagrams in batches, with their addresses in control messages (ip(7), ipv6(7)).

use super::control::{Control, append, control_messages};
use super::{get, last_errno, set};
use rustix::fd::{AsRawFd, BorrowedFd};
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::ptr;
use urnic_sys::{Numbers, Plain, Unpadded};
use urnic_wire::roce::{MAX_HEADER_LEN, MAX_TRAILER_LEN};

/// Longest payload of a datagram: the largest path MTU of InfiniBand.
pub const MAX_PAYLOAD: usize = 4096;
/// Bytes for a packet.
pub const PACKET_ROOM: usize = (MAX_HEADER_LEN + MAX_PAYLOAD + MAX_TRAILER_LEN).next_multiple_of(64);
/// Bytes for a packet of any length.
pub const LONG_ROOM: usize = 64 << 10;
/// Messages that go to or come from the kernel in one call. Each is a packet, or has the segments
/// of several.
pub const BATCH: usize = 16;
/// Segments of a packet at most (linux/udp.h: UDP_MAX_SEGMENTS; newer kernels take more).
pub const MAX_SEGMENTS: usize = 64;

/// A packet to be sent.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing {
    /// The packet's range in the buffer.
    pub at: usize,
    /// Its length in bytes.
    pub len: usize,
    /// The source address.
    pub source: IpAddr,
    /// The destination address.
    pub destination: SocketAddr,
    /// The IP header's traffic class.
    pub traffic_class: u8,
    /// 0 begins a packet of the kernel. Those with 1, 2 and so on that follow are its further
    /// segments, which the network makes packets of (UDP GSO): they have the addresses and the
    /// length of the first, or the last one is shorter, and each begins where the one before it
    /// ends. This is the identification in the IPv4 header.
    pub segment: u16,
}

/// Bytes of a packet's segments at most.
pub const SEGMENTS_ROOM: usize = 65_000;

/// A packet that was received.
#[derive(Debug, Clone, Copy)]
pub struct Incoming {
    /// Where it begins in the buffer.
    pub at: usize,
    /// Its length in bytes; more than the buffer has for one that was cut.
    pub len: usize,
    /// The source address of the packet.
    pub source: SocketAddr,
    /// The destination address: one of this host's, or a group's.
    pub destination: IpAddr,
    /// The IP header's traffic class.
    pub traffic_class: u8,
}

impl Incoming {
    /// Its bytes in the buffer; none if it was cut.
    pub fn bytes<'b>(&self, buffer: &'b [u8]) -> Option<&'b [u8]> {
        buffer.get(self.at..self.at.checked_add(self.len)?)
    }
}

/// Makes a socket report the destination and the traffic class of packets, and send without
/// fragments.
pub(crate) fn prepare(socket: BorrowedFd<'_>, ipv6: bool) -> Result<(), Errno> {
    if ipv6 {
        set(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
        set(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
        set(
            socket,
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_PMTUDISC_DO,
        )?;
        set(socket, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_ALL, 0)?;
    } else {
        set(socket, libc::IPPROTO_IP, libc::IP_PKTINFO, 1)?;
    }
    set(socket, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0)?;
    // Also for an IPv6 socket: it may carry IPv4.
    set(socket, libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
    set(
        socket,
        libc::IPPROTO_IP,
        libc::IP_MTU_DISCOVER,
        libc::IP_PMTUDISC_DO,
    )
}

/// Makes a socket that is bound to all addresses receive the packets to all groups that some socket
/// of the host has joined.
pub(crate) fn hear_all_groups(socket: BorrowedFd<'_>, ipv6: bool) -> Result<(), Errno> {
    if ipv6 {
        set(socket, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_ALL, 1)?;
    }
    // Also for an IPv6 socket: it may carry IPv4.
    set(socket, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 1)
}

/// Makes the system give packets of one flow and one length together (UDP GRO).
pub(crate) fn merge(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    set(socket, libc::SOL_UDP, libc::UDP_GRO, 1)
}

/// Makes a socket send a packet in fragments that is longer than the path's MTU, as far as the
/// system knows that (`IP_PMTUDISC_WANT`).
pub(crate) fn allow_fragments(socket: BorrowedFd<'_>, ipv6: bool) -> Result<(), Errno> {
    if ipv6 {
        set(
            socket,
            libc::IPPROTO_IPV6,
            libc::IPV6_MTU_DISCOVER,
            libc::IPV6_PMTUDISC_WANT,
        )?;
    }
    // Also for an IPv6 socket: it may carry IPv4.
    set(
        socket,
        libc::IPPROTO_IP,
        libc::IP_MTU_DISCOVER,
        libc::IP_PMTUDISC_WANT,
    )
}

/// The MTU of the path to which a socket is connected, with all headers.
pub(crate) fn path_mtu(socket: BorrowedFd<'_>, ipv6: bool) -> Result<usize, Errno> {
    let (level, name) = match ipv6 {
        true => (libc::IPPROTO_IPV6, libc::IPV6_MTU),
        false => (libc::IPPROTO_IP, libc::IP_MTU),
    };
    let (mtu, _) = get(socket, level, name, 0u32)?;
    Ok(mtu as usize)
}

/// Makes the system return packets that did not arrive; see [`refused`].
pub(crate) fn return_refused(socket: BorrowedFd<'_>, ipv6: bool) -> Result<(), Errno> {
    if ipv6 {
        set(socket, libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 1)?;
    }
    // Also for an IPv6 socket: it may carry IPv4.
    set(socket, libc::IPPROTO_IP, libc::IP_RECVERR, 1)
}

/// Makes a socket drop the packets that arrive.
pub(crate) fn keep_nothing(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    // A program of the classic BPF: the number of bytes to keep is 0 (linux/bpf_common.h: BPF_RET).
    let mut instruction = libc::sock_filter {
        code: 0x06,
        jt: 0,
        jf: 0,
        k: 0,
    };
    let program = libc::sock_fprog {
        len: 1,
        filter: &raw mut instruction,
    };
    // SAFETY: the program and its one instruction are live; the kernel only reads them, and only
    // during the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_setsockopt,
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            &raw const program,
            size_of::<libc::sock_fprog>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(last_errno()) }
}

/// A packet that was sent and did not arrive.
#[derive(Debug, Clone, Copy)]
pub struct Refused {
    /// Why.
    pub errno: Errno,
    /// Where it was sent to.
    pub destination: SocketAddr,
    /// The number of its first bytes that are in the buffer.
    pub len: usize,
}

/// Takes a packet that was sent and did not arrive, and its first bytes into `buffer`.
///
/// # Errors
/// `EAGAIN` when there is none; those of recvmsg(2).
pub(crate) fn refused(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Refused, Errno> {
    let mut name = Name::UNSET;
    let mut control = Control::EMPTY;
    let mut extent = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let mut header = libc::msghdr::zeroes();
    (header.msg_iov, header.msg_iovlen) = (&raw mut extent, 1);
    header.msg_name = name.0.as_mut_ptr().cast();
    header.msg_namelen = name.0.len() as libc::socklen_t;
    header.msg_control = control.0.as_mut_ptr().cast();
    header.msg_controllen = Control::ROOM as _;
    // SAFETY: the header points to live memory of the lengths given, which nothing else accesses
    // during the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_recvmsg,
            socket.as_raw_fd(),
            &raw mut header,
            libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT,
        )
    };
    let len = usize::try_from(done).map_err(|_| last_errno())?;
    let used = control.0.get(..header.msg_controllen as _).unwrap_or_default();
    let errno = control_messages(used).find_map(|(level, kind, value)| {
        let is_error = matches!(
            (level, kind),
            (libc::IPPROTO_IP, libc::IP_RECVERR) | (libc::IPPROTO_IPV6, libc::IPV6_RECVERR)
        );
        // The first field of `struct sock_extended_err`.
        let errno = value.first_chunk().filter(|_| is_error)?;
        i32::try_from(u32::from_ne_bytes(*errno)).ok()
    });
    Ok(Refused {
        errno: errno.map_or(Errno::IO, Errno::from_raw_os_error),
        destination: read_name(&name),
        len,
    })
}

/// Packets that the socket has dropped, mostly because its buffer was full; wraps around. `None` if
/// the system does not say.
pub(crate) fn drops(socket: BorrowedFd<'_>) -> Option<u32> {
    // linux/sock_diag.h: indices of SO_MEMINFO's array.
    const SK_MEMINFO_DROPS: usize = 8;
    let values = [0u32; SK_MEMINFO_DROPS + 1];
    let (values, len) = get(socket, libc::SOL_SOCKET, libc::SO_MEMINFO, values).ok()?;
    (len == size_of_val(&values)).then(|| values[SK_MEMINFO_DROPS])
}

/// The control messages of a packet; returns their length.
fn control_of(packet: &Outgoing, ipv6: bool, control: &mut Control) -> usize {
    let used = match packet.source {
        IpAddr::V4(ip) if !ipv6 => {
            let info = libc::in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: libc::in_addr {
                    s_addr: u32::from_ne_bytes(ip.octets()),
                },
                ipi_addr: libc::in_addr { s_addr: 0 },
            };
            append(control, 0, libc::IPPROTO_IP, libc::IP_PKTINFO, info.as_bytes())
        }
        ip => {
            let info = libc::in6_pktinfo {
                ipi6_addr: libc::in6_addr {
                    s6_addr: mapped(ip).octets(),
                },
                ipi6_ifindex: 0,
            };
            append(
                control,
                0,
                libc::IPPROTO_IPV6,
                libc::IPV6_PKTINFO,
                info.as_bytes(),
            )
        }
    };
    let class = libc::c_int::from(packet.traffic_class);
    match packet.destination.ip() {
        _ if class == 0 => used,
        IpAddr::V4(_) => append(control, used, libc::IPPROTO_IP, libc::IP_TOS, class.as_bytes()),
        IpAddr::V6(_) => append(
            control,
            used,
            libc::IPPROTO_IPV6,
            libc::IPV6_TCLASS,
            class.as_bytes(),
        ),
    }
}

fn mapped(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

/// The IPv6 scope of an address.
pub(crate) fn scope_of(address: SocketAddr) -> u32 {
    match address {
        SocketAddr::V6(v6) => v6.scope_id(),
        SocketAddr::V4(_) => 0,
    }
}

/// Writes an address in the kernel's form for a socket of this family; returns its length.
fn write_name(address: SocketAddr, ipv6: bool, name: &mut Name) -> usize {
    match address {
        SocketAddr::V4(v4) if !ipv6 => {
            let short = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from_ne_bytes(v4.ip().octets()),
                },
                sin_zero: [0; 8],
            };
            name.write(&short)
        }
        address => name.write(&libc::sockaddr_in6 {
            sin6_family: libc::AF_INET6 as libc::sa_family_t,
            sin6_port: address.port().to_be(),
            sin6_flowinfo: 0,
            sin6_addr: libc::in6_addr {
                s6_addr: mapped(address.ip()).octets(),
            },
            sin6_scope_id: scope_of(address),
        }),
    }
}

/// Reads an address that the kernel wrote; IPv4 in its own family.
fn read_name(name: &Name) -> SocketAddr {
    let short: libc::sockaddr_in = name.read();
    if libc::c_int::from(short.sin_family) == libc::AF_INET {
        let ip = Ipv4Addr::from(short.sin_addr.s_addr.to_ne_bytes());
        return SocketAddrV4::new(ip, u16::from_be(short.sin_port)).into();
    }
    let name: libc::sockaddr_in6 = name.read();
    let port = u16::from_be(name.sin6_port);
    let ip = Ipv6Addr::from(name.sin6_addr.s6_addr);
    match ip.to_ipv4_mapped() {
        Some(ip) => SocketAddrV4::new(ip, port).into(),
        None => SocketAddrV6::new(ip, port, 0, name.sin6_scope_id).into(),
    }
}

/// The bytes of an address: a `sockaddr_in` or the longer `sockaddr_in6`.
#[repr(C, align(4))]
struct Name([u8; size_of::<libc::sockaddr_in6>()]);

impl Name {
    const UNSET: Name = Name([0; size_of::<libc::sockaddr_in6>()]);

    /// Writes an address; returns its length.
    fn write<T: Unpadded>(&mut self, address: &T) -> usize {
        let bytes = address.as_bytes();
        self.0[..bytes.len()].copy_from_slice(bytes);
        bytes.len()
    }

    fn read<T: Numbers>(&self) -> T {
        T::parse(&self.0).unwrap_or(T::zeroes())
    }
}

/// What the header of a message points to, with its bytes.
struct Place {
    name: Name,
    control: Control,
}

/// Places for a batch. Only those in use are written: most calls are for one packet or none.
type Batch<T> = [MaybeUninit<T>; BATCH];

const fn batch<T>() -> Batch<T> {
    [const { MaybeUninit::uninit() }; BATCH]
}

/// Where bytes of a packet are.
fn extent(bytes: *mut u8, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.cast(),
        iov_len: len,
    }
}

/// A message whose header points to `place` and the bytes in `extents`, with these lengths of name
/// and control messages.
fn message(
    place: &mut Place,
    extents: &mut [MaybeUninit<libc::iovec>],
    name_len: usize,
    control_len: usize,
) -> libc::mmsghdr {
    let mut header = libc::mmsghdr::zeroes();
    let message = &mut header.msg_hdr;
    message.msg_name = ptr::from_mut(&mut place.name).cast();
    message.msg_namelen = name_len as _;
    message.msg_iov = extents.as_mut_ptr().cast();
    message.msg_iovlen = extents.len() as _;
    message.msg_control = place.control.0.as_mut_ptr().cast();
    message.msg_controllen = control_len as _;
    header
}

/// Sends packets, at most [`BATCH`], with one call; returns how many the network took. A packet and
/// its segments are taken together.
///
/// # Errors
/// That of the first packet.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    ipv6: bool,
    buffer: &[u8],
    packets: &[Outgoing],
) -> Result<usize, Errno> {
    let mut places: Batch<Place> = batch();
    let mut extents: Batch<libc::iovec> = batch();
    let mut headers: Batch<libc::mmsghdr> = batch();
    let mut count = 0;
    let runs = packets.chunk_by(|_, next| next.segment != 0);
    let slots = places.iter_mut().zip(extents.chunks_mut(1)).zip(&mut headers);
    for (((place, bytes), header), run) in slots.zip(runs) {
        let run_bytes = bytes_of(run, buffer).ok_or(Errno::INVAL)?;
        bytes[0].write(extent(run_bytes.as_ptr().cast_mut(), run_bytes.len()));
        let place = place.write(Place {
            name: Name::UNSET,
            control: Control::EMPTY,
        });
        let first = &run[0];
        let name_len = write_name(first.destination, ipv6, &mut place.name);
        let mut control_len = control_of(first, ipv6, &mut place.control);
        if run.len() > 1 {
            let len = first.len as u16;
            control_len = append(
                &mut place.control,
                control_len,
                libc::SOL_UDP,
                libc::UDP_SEGMENT,
                &len.to_ne_bytes(),
            );
        }
        header.write(message(place, bytes, name_len, control_len));
        count += 1;
    }
    let packets_in = |messages: usize| {
        let runs = packets.chunk_by(|_, next| next.segment != 0);
        runs.take(messages).map(<[Outgoing]>::len).sum()
    };
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    let headers = headers.as_mut_ptr().cast::<libc::mmsghdr>();
    if count == 1 {
        // SAFETY: the first header is filled in; what it points to is live, and is only read.
        let done = unsafe {
            libc::syscall(
                libc::SYS_sendmsg,
                socket.as_raw_fd(),
                &raw mut (*headers).msg_hdr,
                flags,
            )
        };
        return if done < 0 {
            Err(last_errno())
        } else {
            Ok(packets_in(1))
        };
    }
    // SAFETY: `count` headers are filled in; what they point to is live, and is only read.
    let done = unsafe { libc::syscall(libc::SYS_sendmmsg, socket.as_raw_fd(), headers, count, flags) };
    let done = usize::try_from(done).map_err(|_| last_errno())?;
    Ok(packets_in(done))
}

/// The bytes of a packet and its segments.
fn bytes_of<'b>(run: &[Outgoing], buffer: &'b [u8]) -> Option<&'b [u8]> {
    let begin = run.first()?.at;
    let mut end = begin;
    for packet in run {
        end = (packet.at == end).then_some(end + packet.len)?;
    }
    buffer.get(begin..end)
}

/// Receives messages with one call, at most [`BATCH`] and as many as have room, which is `room`
/// bytes of `buffer` each; returns whether there were as many. A message is a packet, or several
/// that the system has merged ([`merge`]).
///
/// # Errors
/// `EAGAIN` when there is none; those of recvmmsg(2).
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    (buffer, room): (&mut [u8], usize),
    packets: &mut Vec<Incoming>,
) -> Result<bool, Errno> {
    let mut places: Batch<Place> = batch();
    let mut extents: Batch<libc::iovec> = batch();
    let mut headers: Batch<libc::mmsghdr> = batch();
    let mut count = 0;
    let slots = places.iter_mut().zip(extents.chunks_mut(1)).zip(&mut headers);
    for (((place, bytes), header), room) in slots.zip(buffer.chunks_exact_mut(room)) {
        bytes[0].write(extent(room.as_mut_ptr(), room.len()));
        let place = place.write(Place {
            name: Name::UNSET,
            control: Control::EMPTY,
        });
        let name_len = size_of::<libc::sockaddr_in6>();
        header.write(message(place, bytes, name_len, Control::ROOM));
        count += 1;
    }
    // SAFETY: `count` headers are filled in; they point to live memory of the lengths given, which
    // nothing else accesses during the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_recvmmsg,
            socket.as_raw_fd(),
            headers.as_mut_ptr(),
            count,
            libc::MSG_DONTWAIT,
            ptr::null_mut::<libc::timespec>(),
        )
    };
    let done = usize::try_from(done).map_err(|_| last_errno())?;
    let written = places.iter().zip(&headers).take(done.min(count));
    for ((place, header), at) in written.zip((0..).step_by(room)) {
        // SAFETY: the first `count` places and headers are written.
        let (place, header) = unsafe { (place.assume_init_ref(), header.assume_init_ref()) };
        let used = place.control.0.get(..header.msg_hdr.msg_controllen as _);
        let control = used.unwrap_or_default();
        let packet = Incoming {
            at,
            len: header.msg_len as usize,
            source: read_name(&place.name),
            destination: destination(control).unwrap_or(Ipv6Addr::UNSPECIFIED.into()),
            traffic_class: traffic_class(control),
        };
        let was_cut = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
        match segment_len(control) {
            // No buffer has so many bytes.
            _ if was_cut => packets.push(Incoming {
                len: usize::MAX,
                ..packet
            }),
            Some(len) => packets.extend(segments(packet, len)),
            None => packets.push(packet),
        }
    }
    Ok(done == count)
}

/// The packets of one length, the last of which may be shorter, that are in the place of `whole`.
fn segments(whole: Incoming, len: usize) -> impl Iterator<Item = Incoming> {
    let end = whole.at + whole.len;
    (whole.at..end).step_by(len).map(move |at| Incoming {
        at,
        len: len.min(end - at),
        ..whole
    })
}

/// No packet is as short. A guest's network card may name segments of any length.
const SHORTEST_SEGMENT: usize = 12;

/// The length of the packets in a message that has several.
fn segment_len(control: &[u8]) -> Option<usize> {
    let len = control_messages(control).find_map(|message| match message {
        (libc::SOL_UDP, libc::UDP_GRO, value) => value.first_chunk(),
        _ => None,
    })?;
    let len = usize::try_from(i32::from_ne_bytes(*len)).ok();
    len.filter(|len| *len >= SHORTEST_SEGMENT)
}

/// The traffic class in the control messages of a received packet.
fn traffic_class(control: &[u8]) -> u8 {
    let class = control_messages(control).find_map(|message| match message {
        (libc::IPPROTO_IP, libc::IP_TOS, &[class, ..]) => Some(class),
        (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, value) => {
            Some(u32::from_ne_bytes(*value.first_chunk()?) as u8)
        }
        _ => None,
    });
    class.unwrap_or_default()
}

/// The destination address in the control messages of a received packet.
fn destination(control: &[u8]) -> Option<IpAddr> {
    control_messages(control).find_map(|message| match message {
        (libc::IPPROTO_IP, libc::IP_PKTINFO, value) => {
            let info = libc::in_pktinfo::parse(value)?;
            Some(Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes()).into())
        }
        (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, value) => {
            let info = libc::in6_pktinfo::parse(value)?;
            Some(IpAddr::V6(Ipv6Addr::from(info.ipi6_addr.s6_addr)).to_canonical())
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;
    use std::net::UdpSocket;

    #[test]
    fn segments_arrive_as_packets() {
        let [from, to] = [(); 2].map(|()| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        prepare(from.as_fd(), false).unwrap();
        let buffer: Vec<u8> = (0..=u8::MAX).collect();
        let (mut at, mut packets) = (0, Vec::new());
        for (len, segment) in [(60, 0), (60, 1), (20, 2), (50, 0), (40, 0), (26, 1)] {
            packets.push(Outgoing {
                at,
                len,
                source: Ipv4Addr::LOCALHOST.into(),
                destination: to.local_addr().unwrap(),
                traffic_class: 0,
                segment,
            });
            at += len;
        }
        // One call of sendmmsg(2) for all, and one of sendmsg(2) for the last two.
        for packets in [&packets[..], &packets[4..]] {
            assert_eq!(send(from.as_fd(), false, &buffer, packets), Ok(packets.len()));
            for packet in packets {
                let mut place = [0; 100];
                let len = to.recv(&mut place).unwrap();
                assert_eq!(place[..len], buffer[packet.at..packet.at + packet.len]);
            }
        }
    }
}
