//! The two commands that libibverbs sends to the device file by itself, without the provider: a
//! write(2) that makes a completion channel, and an ioctl(2) that makes a channel for the
//! asynchronous events of an imported context.

use std::cell::Cell;
use std::mem::offset_of;
use std::os::fd::RawFd;

use rustix::io::Errno;

use super::events;
use urnic_process::fds::{self, Kind};
use urnic_sys::{Numbers, Plain};

/// `IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL` of `<rdma/ib_user_verbs.h>`.
const CREATE_COMP_CHANNEL: u32 = 17;

/// `struct ib_uverbs_cmd_hdr` with `struct ib_uverbs_create_comp_channel` after it.
#[repr(C)]
#[derive(Clone, Copy)]
struct CreateCompChannel {
    command: u32,
    /// Length of the command in 32-bit words.
    in_words: u16,
    /// Room for the response in 32-bit words.
    out_words: u16,
    /// The address for the response: `struct { __u32 fd; }`.
    response: u64,
}

const _: () = assert!(size_of::<CreateCompChannel>() == 16 && offset_of!(CreateCompChannel, response) == 8);
// SAFETY: numbers.
unsafe impl Plain for CreateCompChannel {}
// SAFETY: 4 + 2 + 2 + 8 bytes are 16.
unsafe impl Numbers for CreateCompChannel {}

/// Executes the command that the program wrote to `fd`, if `fd` is our device. Returns the number
/// of bytes written, as write(2) does, or None if `fd` is not our device.
///
/// # Errors
/// `EINVAL` for a malformed command, `EOPNOTSUPP` for an unknown one, `EFAULT` for a null response,
/// and the errors of making a socket.
///
/// # Safety
/// `bytes` points to `length` readable bytes. As with the kernel's device, a command contains an
/// address that will be written to: the caller is responsible for that address.
pub unsafe fn write(fd: RawFd, bytes: *const u8, length: usize) -> Option<Result<usize, Errno>> {
    if fds::verified_kind(fd)? != Kind::Uverbs {
        return None;
    }
    if bytes.is_null() {
        return Some(Err(Errno::FAULT));
    }
    // The length of a known command, and one byte more to tell a longer one.
    let known = length.min(size_of::<CreateCompChannel>() + 1);
    // SAFETY: the caller promises `length` readable bytes, which are at least these.
    let command = unsafe { std::slice::from_raw_parts(bytes, known) };
    let executed = execute(command).map(|(fd, response)| {
        // SAFETY: the program gave this address for the response.
        unsafe { response.write_unaligned(fd as u32) };
        length
    });
    Some(executed)
}

/// Executes a command; returns the new fd and the address for it, which is not null.
fn execute(command: &[u8]) -> Result<(RawFd, *mut u32), Errno> {
    if command.len() < 8 {
        return Err(Errno::INVAL);
    }
    if u32::parse(command) != Some(CREATE_COMP_CHANNEL) {
        return Err(Errno::OPNOTSUPP);
    }
    if command.len() != size_of::<CreateCompChannel>() {
        return Err(Errno::INVAL);
    }
    let request = CreateCompChannel::parse(command).ok_or(Errno::INVAL)?;
    if usize::from(request.in_words) * 4 != command.len() || request.out_words < 1 {
        return Err(Errno::INVAL);
    }
    let response = request.response as *mut u32;
    if response.is_null() {
        return Err(Errno::FAULT);
    }
    let (program, sender) = events::open()?;
    drop(sender); // the registry has it
    Ok((program, response))
}

/// `RDMA_VERBS_IOCTL` of `<rdma/rdma_user_ioctl_cmds.h>`.
pub const VERBS_IOCTL: u64 = 0xc018_1b01;
/// `UVERBS_OBJECT_ASYNC_EVENT` of `<rdma/ib_user_ioctl_cmds.h>`. Its method
/// `UVERBS_METHOD_ASYNC_EVENT_ALLOC` and the method's attribute
/// `UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE` have the number 0.
const ASYNC_EVENT: u16 = 16;

/// `struct ib_uverbs_ioctl_hdr` with one `struct ib_uverbs_attr` after it.
#[repr(C)]
#[derive(Clone, Copy)]
struct AllocAsyncFd {
    /// Length of the whole structure in bytes.
    length: u16,
    object: u16,
    method: u16,
    attributes: u16,
    reserved: u64,
    driver: u32,
    reserved2: u32,
    attribute: u16,
    attribute_length: u16,
    attribute_flags: u16,
    attribute_reserved: u16,
    /// The address of the fd in the response.
    fd: u64,
}

const _: () = assert!(size_of::<AllocAsyncFd>() == 40 && offset_of!(AllocAsyncFd, fd) == 32);

thread_local! {
    /// The program's end of the channel that was made last for a context that this thread imports.
    static ASYNC_FD: Cell<RawFd> = const { Cell::new(-1) };
}

/// Sets the fd that the thread's next command for a channel of asynchronous events returns. The
/// provider made the channel of the context that it imports; libibverbs requests it from the device
/// file next, on the same thread.
pub fn offer_async_fd(fd: RawFd) {
    ASYNC_FD.set(fd);
}

/// Executes the ioctl(2) of the program on `fd`, if `fd` is our device.
///
/// # Errors
/// `ENOTTY`, as of an old kernel: the command is not known. libibverbs then makes the request
/// in another way.
///
/// # Safety
/// The request is [`VERBS_IOCTL`], and `argument` is null or points to the request's header,
/// followed by as many bytes as the header gives.
pub unsafe fn ioctl(fd: RawFd, argument: *mut u8) -> Option<Result<(), Errno>> {
    // SAFETY: the caller's promise.
    (fds::verified_kind(fd)? == Kind::Uverbs).then(|| unsafe { alloc_async_fd(argument) }.ok_or(Errno::NOTTY))
}

/// Executes the one command that is known; `None`: it is another.
///
/// # Safety
/// The conditions of [`ioctl`].
unsafe fn alloc_async_fd(argument: *mut u8) -> Option<()> {
    if argument.is_null() {
        return None;
    }
    // SAFETY: `argument` is not null, and the header begins with its length.
    let length = unsafe { argument.cast::<u16>().read_unaligned() };
    if usize::from(length) != size_of::<AllocAsyncFd>() {
        return None;
    }
    // SAFETY: the header gives this length, and the caller promises that many bytes.
    let request = unsafe { argument.cast::<AllocAsyncFd>().read_unaligned() };
    if (
        request.object,
        request.method,
        request.attributes,
        request.attribute,
    ) != (ASYNC_EVENT, 0, 1, 0)
    {
        return None;
    }
    let offered = u64::try_from(ASYNC_FD.replace(-1)).ok()?;
    // SAFETY: the written field is inside the header and its attribute, which the program gave for
    // the answer.
    unsafe {
        argument
            .add(offset_of!(AllocAsyncFd, fd))
            .cast::<u64>()
            .write_unaligned(offered);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::super::registry;
    use super::*;
    use rustix::fs::{Mode, OFlags, open};
    use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

    fn device() -> OwnedFd {
        fds::adopt_process();
        let fd = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
        registry::enter_uverbs(fd.as_fd()).unwrap();
        fd
    }

    fn request(command: u32, response: &mut u32) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&command.to_ne_bytes());
        bytes[4..6].copy_from_slice(&4u16.to_ne_bytes());
        bytes[6..8].copy_from_slice(&1u16.to_ne_bytes());
        bytes[8..].copy_from_slice(&(std::ptr::from_mut(response) as u64).to_ne_bytes());
        bytes
    }

    fn submit(fd: &OwnedFd, bytes: &[u8]) -> Option<Result<usize, Errno>> {
        // SAFETY: `bytes` is a slice; the response is a live variable of the caller.
        unsafe { write(fd.as_raw_fd(), bytes.as_ptr(), bytes.len()) }
    }

    #[test]
    fn a_completion_channel_is_made() {
        let device = device();
        let mut fd = u32::MAX;
        let command = request(CREATE_COMP_CHANNEL, &mut fd);
        assert_eq!(submit(&device, &command), Some(Ok(16)));
        // SAFETY: the command answered with a new fd that is ours to close.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as RawFd) };
        let sender = registry::channel(fd.as_raw_fd()).unwrap();
        sender.send(&7u64.to_ne_bytes());
        let mut record = [0; 32];
        assert_eq!(rustix::io::read(&fd, record.as_mut_slice()), Ok(8));
        registry::forget(fd.as_raw_fd());
        registry::forget(device.as_raw_fd());
    }

    #[test]
    fn other_commands_are_not_supported() {
        let device = device();
        let mut fd = 0;
        assert_eq!(submit(&device, &request(3, &mut fd)), Some(Err(Errno::OPNOTSUPP)));
        assert_eq!(submit(&device, &[17, 0, 0]), Some(Err(Errno::INVAL)));
        let mut short = request(CREATE_COMP_CHANNEL, &mut fd);
        short[4] = 3;
        assert_eq!(submit(&device, &short), Some(Err(Errno::INVAL)));
        registry::forget(device.as_raw_fd());
    }

    #[test]
    fn a_channel_of_asynchronous_events_is_given_once() {
        let device = device();
        let mut command = AllocAsyncFd {
            length: 40,
            object: ASYNC_EVENT,
            method: 0,
            attributes: 1,
            reserved: 0,
            driver: 0,
            reserved2: 0,
            attribute: 0,
            attribute_length: 0,
            attribute_flags: 1,
            attribute_reserved: 0,
            fd: 0,
        };
        let ask = |command: &mut AllocAsyncFd| {
            // SAFETY: the command is a live structure of the length in its header.
            unsafe { ioctl(device.as_raw_fd(), std::ptr::from_mut(command).cast()) }
        };
        let unknown = Some(Err(Errno::NOTTY));
        assert_eq!(ask(&mut command), unknown, "nothing was offered");
        offer_async_fd(77);
        let mut other = AllocAsyncFd { object: 1, ..command };
        assert_eq!(ask(&mut other), unknown);
        assert_eq!(ask(&mut command), Some(Ok(())));
        assert_eq!(command.fd, 77);
        assert_eq!(ask(&mut command), unknown);
        registry::forget(device.as_raw_fd());
    }

    #[test]
    fn a_number_that_was_reused_is_not_our_device() {
        let device = device();
        let file = open(
            "/proc/self/status",
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .unwrap();
        let mut device = device;
        rustix::io::dup2(&file, &mut device).unwrap();
        assert_eq!(submit(&device, &[0; 16]), None);
        registry::forget(device.as_raw_fd());
    }
}
