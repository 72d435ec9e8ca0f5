//! Structures of C that are numbers and pointers.

/// A structure of C for which all zeroes is a value.
///
/// # Safety
/// All fields are numbers, pointers, functions that may be null, unions of these, and locks that
/// zeroes initialise.
pub unsafe trait Plain: Sized {
    /// All zeroes.
    #[inline]
    fn zeroes() -> Self {
        // SAFETY: the contract of this trait.
        unsafe { std::mem::zeroed() }
    }
}

/// A structure of C, or a number, that any bytes of its length are.
///
/// # Safety
/// All fields are numbers.
pub unsafe trait Numbers: Plain + Copy {
    /// The value that begins `bytes`; `None` if they are too few.
    #[inline]
    fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..size_of::<Self>())?;
        // SAFETY: there are as many bytes, and any bytes are a value.
        Some(unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }
}

/// Numbers whose bytes can be read.
///
/// # Safety
/// There is no padding between or after the fields.
pub unsafe trait Unpadded: Numbers {
    /// The bytes of the value.
    #[inline]
    fn as_bytes(&self) -> &[u8] {
        // SAFETY: the value is that long, and has no padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

macro_rules! plain {
    ($($structure:ty)*) => { $(
        // SAFETY: numbers, pointers, and functions that may be null.
        unsafe impl Plain for $structure {}
    )* };
}

macro_rules! numbers {
    ($($structure:ty)*) => { $(
        // SAFETY: numbers.
        unsafe impl Plain for $structure {}
        // SAFETY: numbers.
        unsafe impl Numbers for $structure {}
    )* };
}

macro_rules! unpadded {
    ($($structure:ty)*) => { $(
        // SAFETY: the lengths of the fields add up to that of the structure (libc's definitions).
        unsafe impl Unpadded for $structure {}
    )* };
}

plain! {
    libc::Dl_info libc::mmsghdr libc::msghdr libc::seccomp_notif libc::sigaction
    libc::sigset_t
}

numbers! {
    u32 libc::c_int libc::cmsghdr libc::in_pktinfo libc::in6_pktinfo libc::sockaddr_in libc::sockaddr_in6
    libc::sctp_rcvinfo libc::sctp_sndinfo libc::sockaddr_storage libc::tcp_info
}

unpadded! {
    libc::c_int libc::cmsghdr libc::in_pktinfo libc::in6_pktinfo libc::sctp_sndinfo libc::sockaddr_in
    libc::sockaddr_in6 libc::sockaddr_storage
}

// SAFETY: numbers.
unsafe impl<const N: usize> Plain for [u32; N] {}
// SAFETY: numbers.
unsafe impl<const N: usize> Numbers for [u32; N] {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_parsed_from_its_bytes_at_any_address() {
        let mut header = libc::cmsghdr::zeroes();
        (header.cmsg_len, header.cmsg_level, header.cmsg_type) = (1, 2, 3);
        let mut bytes = vec![0xff];
        bytes.extend_from_slice(header.as_bytes());
        let parsed = libc::cmsghdr::parse(&bytes[1..]);
        let fields = parsed.map(|header| (header.cmsg_len, header.cmsg_level, header.cmsg_type));
        assert_eq!(fields, Some((1, 2, 3)));
        assert!(libc::cmsghdr::parse(&bytes[2..]).is_none());
    }
}
