//! Control messages of sendmsg(2) and recvmsg(2), as in cmsg(3).

use urnic_sys::{Numbers, Plain, Unpadded};

/// Control messages, aligned as the kernel requires it.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(super) struct Control(pub(super) [u8; Control::ROOM]);

impl Control {
    /// Bytes for the control messages of a packet: its address, its traffic class, and the length
    /// of segments.
    pub(super) const ROOM: usize = 128;
    pub(super) const EMPTY: Control = Control([0; Control::ROOM]);
}

/// Appends a control message to `control`, of which `used` bytes are in use; returns how many are.
pub(super) fn append(
    control: &mut Control,
    used: usize,
    level: libc::c_int,
    kind: libc::c_int,
    value: &[u8],
) -> usize {
    let header_len = size_of::<libc::cmsghdr>();
    let len = header_len + value.len();
    let end = used + len.next_multiple_of(align_of::<libc::cmsghdr>());
    let Some(place) = control.0.get_mut(used..end) else {
        return used;
    };
    let mut header = libc::cmsghdr::zeroes();
    (header.cmsg_len, header.cmsg_level, header.cmsg_type) = (len as _, level, kind);
    place[..header_len].copy_from_slice(header.as_bytes());
    place[header_len..len].copy_from_slice(value);
    end
}

/// The control messages in `control`: their level, kind and value.
pub(super) fn control_messages(
    mut control: &[u8],
) -> impl Iterator<Item = (libc::c_int, libc::c_int, &[u8])> {
    const HEADER_LEN: usize = size_of::<libc::cmsghdr>();
    std::iter::from_fn(move || {
        let header = libc::cmsghdr::parse(control)?;
        // Of different types in glibc and musl.
        let len: usize = header.cmsg_len as _;
        let value = control.get(HEADER_LEN..len)?;
        let step = len.next_multiple_of(align_of::<libc::cmsghdr>());
        control = control.get(step..).unwrap_or_default();
        Some((header.cmsg_level, header.cmsg_type, value))
    })
}
