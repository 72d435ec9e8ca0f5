//! A driver for the urnic function, in the words of docs/reference/device.md: lets a queue pair
//! send to itself and write into its own memory, as `driver.py` does. `urnic serve --socket PATH`
//! is the function.
//!
//! ```text
//! cargo run -p urnic-device-checks --example driver -- PATH [--show]
//! ```
//!
//! `--show` prints the bytes of each command and completion.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::error::Error;
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

type Done<T> = Result<T, Box<dyn Error>>;

/// The DMA addresses of our memory, as we choose them.
const MEMORY: u64 = 0x10_0000;
const LENGTH: usize = 1 << 20;
const COMMANDS: usize = 0;
const COMPLETIONS: usize = 0x4000;
const RECORD: usize = 0x8000;
const SENDS: usize = 0xC000;
const RECEIVES: usize = 0x1_0000;
const CQ: usize = 0x1_4000;
const CQ_RECORD: usize = 0x1_8000;
const DATA: usize = 0x1_C000;
/// log2 of the entries of every ring.
const LOG: u32 = 4;
/// Commands of vfio-user.
const VERSION: u16 = 1;
const DMA_MAP: u16 = 2;
const REGION_INFO: u16 = 5;
const REGION_READ: u16 = 9;
const REGION_WRITE: u16 = 10;

/// Memory that both sides access.
struct Shared(*mut u8, usize);

impl Shared {
    fn map(file: BorrowedFd<'_>, length: usize) -> Done<Shared> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe { mmap(std::ptr::null_mut(), length, rights, MapFlags::SHARED, file, 0)? };
        Ok(Shared(at.cast(), length))
    }

    /// Writes bytes; what is written later is seen later by the device.
    fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.1);
        fence(Ordering::Release);
        for (n, byte) in bytes.iter().enumerate() {
            // SAFETY: within the mapping.
            unsafe { self.0.add(at + n).write_volatile(*byte) };
        }
    }

    fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        assert!(at + N <= self.1);
        // SAFETY: within the mapping.
        let bytes = std::array::from_fn(|n| unsafe { self.0.add(at + n).read_volatile() });
        fence(Ordering::Acquire);
        bytes
    }

    /// Writes a doubleword at once.
    fn ring(&self, slot: usize, value: u64) {
        assert!(slot + 8 <= self.1 && slot.is_multiple_of(8));
        fence(Ordering::Release);
        // SAFETY: within the mapping, whose beginning is that of a page.
        unsafe { self.0.add(slot).cast::<u64>().write_volatile(value.to_le()) };
    }
}

/// Integers, in little-endian order and without padding.
macro_rules! packed {
    ($($value:expr),* $(,)?) => { [$(&($value).to_le_bytes()[..]),*].concat() };
}

/// The PCI function that a socket serves (section 13; vfio-user 0.1).
struct Function {
    socket: UnixStream,
    memory: Shared,
    pages: Shared,
}

/// Sends a message; returns the payload and the first descriptor of its reply.
fn call(
    socket: &UnixStream,
    command: u16,
    payload: &[u8],
    file: Option<BorrowedFd<'_>>,
) -> Done<(Vec<u8>, Option<OwnedFd>)> {
    let message = [
        packed!(1u16, command, 16 + payload.len() as u32, 0u32, 0u32),
        payload.to_vec(),
    ]
    .concat();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = file.into_iter().collect();
    if !files.is_empty() {
        rights.push(SendAncillaryMessage::ScmRights(&files));
    }
    sendmsg(socket, &[IoSlice::new(&message)], &mut rights, SendFlags::empty())?;
    let mut header = [0; 16];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut header)],
        &mut rights,
        RecvFlags::WAITALL,
    )?;
    let received = rights.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    let received = received.last();
    let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
    if word(8) & 32 != 0 {
        return Err(std::io::Error::from_raw_os_error(word(12) as i32).into());
    }
    let mut reply = vec![0; word(4) as usize - 16];
    (&mut &*socket).read_exact(&mut reply)?;
    Ok((reply, received))
}

impl Function {
    fn open(path: &str) -> Done<Function> {
        let socket = UnixStream::connect(path)?;
        let version = [&packed!(0u16, 1u16)[..], b"{\"capabilities\": {}}\0"].concat();
        call(&socket, VERSION, &version, None)?;
        let file = rustix::fs::memfd_create("driver", rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, LENGTH as u64)?;
        let memory = Shared::map(file.as_fd(), LENGTH)?;
        call(
            &socket,
            DMA_MAP,
            &packed!(32u32, 3u32, 0u64, MEMORY, LENGTH as u64),
            Some(file.as_fd()),
        )?;
        let (_, pages) = call(
            &socket,
            REGION_INFO,
            &packed!(32u32, 0u32, 2u32, 0u32, 0u64, 0u64),
            None,
        )?;
        let pages = pages.ok_or("no doorbell pages")?;
        let pages = Shared::map(pages.as_fd(), rustix::fs::fstat(&pages)?.st_size as usize)?;
        // PCI: decode memory, be bus master.
        call(&socket, REGION_WRITE, &packed!(4u64, 7u32, 2u32, 6u16), None)?;
        Ok(Function {
            socket,
            memory,
            pages,
        })
    }

    fn read(&self, register: u64) -> Done<u32> {
        let (reply, _) = call(&self.socket, REGION_READ, &packed!(register, 0u32, 4u32), None)?;
        Ok(u32::from_le_bytes(reply[16..20].try_into()?))
    }

    fn write(&self, register: u64, value: u32) -> Done<()> {
        call(
            &self.socket,
            REGION_WRITE,
            &packed!(register, 0u32, 4u32, value),
            None,
        )
        .map(drop)
    }

    /// Whether the device executes commands.
    fn is_ready(&self) -> Done<bool> {
        let status = self.read(0x08)?;
        if status & 2 != 0 {
            let code = self.read(0x10)?;
            return Err(format!("the device stopped: FATAL, with FATAL_CODE {code}").into());
        }
        Ok(status & 1 != 0)
    }

    /// Rings for a queue (section 5), and wakes the device if it sleeps.
    fn doorbell(&self, kind: u64, (number, slot): (u32, u32), index: u64) -> Done<()> {
        self.pages
            .ring(slot as usize, kind << 56 | u64::from(number) << 32 | index);
        fence(Ordering::SeqCst);
        match u32::from_le_bytes(self.pages.get(0xFF8)) {
            0 => Ok(()),
            _ => self.write(0x38, 1),
        }
    }
}

/// Waits for the device, for ten seconds at most and while it has no fatal error.
fn wait(function: &Function, mut condition: impl FnMut() -> Done<bool>) -> Done<()> {
    let begin = Instant::now();
    let mut look = begin;
    while !condition()? {
        if look.elapsed() > Duration::from_millis(100) {
            look = Instant::now();
            function.is_ready()?;
        }
        if begin.elapsed() > Duration::from_secs(10) {
            return Err("the device does not answer".into());
        }
    }
    Ok(())
}

/// Groups of four bytes, from the end, as Python's `bytes.hex(' ', -4)` writes them.
fn hex(bytes: &[u8]) -> String {
    let groups = bytes
        .chunks(4)
        .map(|group| group.iter().map(|byte| format!("{byte:02x}")).collect());
    groups.collect::<Vec<String>>().join(" ")
}

struct Driver {
    function: Function,
    show: bool,
    commands: u32,
}

impl Driver {
    fn start(function: Function, show: bool) -> Done<Driver> {
        if function.read(0x00)? != 0x696E_7275 || function.read(0x04)? >> 16 != 3 {
            return Err("another device".into());
        }
        function.write(0x0C, 2)?; // RESET
        wait(&function, || Ok(function.read(0x0C)? & 2 == 0))?;
        function.write(0x1C, LOG)?;
        for (register, place) in [(0x20, COMMANDS), (0x28, COMPLETIONS)] {
            function.write(register, MEMORY as u32 + place as u32)?;
            function.write(register + 4, 0)?;
        }
        function.write(0x0C, 1)?; // ENABLE
        wait(&function, || function.is_ready())?;
        Ok(Driver {
            function,
            show,
            commands: 0,
        })
    }

    /// Executes a command (section 3); returns the payload of its completion.
    fn command(&mut self, opcode: u16, payload: &[u8]) -> Done<Vec<u8>> {
        let place = (self.commands % (1 << LOG)) as usize;
        let phase = 1 - (self.commands >> LOG) as u8 % 2;
        let id = self.commands as u16;
        let mut entry = [
            packed!(opcode, id, 0u32, 0u64, 0u64, 0u32, 0u32),
            payload.to_vec(),
        ]
        .concat();
        entry.resize(128, 0);
        let memory = &self.function.memory;
        memory.put(COMMANDS + 128 * place, &entry);
        self.commands += 1;
        self.function.write(0x30, self.commands)?;
        let at = COMPLETIONS + 64 * place;
        wait(&self.function, || Ok(memory.get::<1>(at + 0x3C)[0] & 1 == phase))?;
        let completion: [u8; 64] = memory.get(at);
        if self.show {
            let end = entry
                .iter()
                .rposition(|byte| *byte != 0)
                .map_or(0, |last| last + 1);
            println!("> {}\n< {} ...", hex(&entry[..end]), hex(&completion[..16]));
        }
        match u16::from_le_bytes([completion[2], completion[3]]) {
            0 => Ok(completion[8..56].to_vec()),
            status => Err(format!("command {opcode}: status {status}").into()),
        }
    }

    /// Executes a command whose result begins with a number.
    fn number(&mut self, opcode: u16, payload: &[u8]) -> Done<u32> {
        Ok(u32::from_le_bytes(
            self.command(opcode, payload)?[..4].try_into()?,
        ))
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (show, paths): (Vec<_>, Vec<_>) = arguments.iter().partition(|word| *word == "--show");
    let [path] = paths.as_slice() else {
        eprintln!("usage: driver PATH [--show]      PATH: the socket of urnic serve");
        return ExitCode::FAILURE;
    };
    match run(path, !show.is_empty()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("driver: {path}: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(path: &str, show: bool) -> Done<()> {
    let mut driver = Driver::start(Function::open(path)?, show)?;
    let place = |at: usize| MEMORY + at as u64;
    let pd = driver.number(10, &[])?; // AllocPd
    let rights = 1u32 | 2; // LOCAL_WRITE, REMOTE_WRITE
    // CreateMr, with addresses from 0 on.
    let region = packed!(0u64, 0x1000u64, place(DATA), pd, rights, 0u32, 0u32);
    let stag = driver.number(16, &region)?;
    // CreateCq: no event queue, and doorbell page 0, the driver's own.
    let cq = driver.number(24, &packed!(place(CQ), place(CQ_RECORD), LOG, 0u32, 0u32, 0u32))?;
    // CreateQp, with label 7; a receive has 32 bytes. The result is its number, and its slot.
    let mut pair = packed!(place(SENDS), place(RECEIVES), place(RECORD));
    pair.extend(packed!(
        pd, cq, cq, 0u32, 0u32, 7u32, LOG, LOG, 5u32, 0u32, 0u32, 0u32
    ));
    let result = driver.command(32, &pair)?;
    let qp = (
        u32::from_le_bytes(result[..4].try_into()?),
        u32::from_le_bytes(result[4..8].try_into()?),
    );
    for state in [1u32, 2, 3] {
        // Init, Rtr, Rts; with remote rights.
        driver.command(
            33,
            &packed!(qp.0, 1u32 | 2, state, rights, 0u32, 0u32, 0u32, 0u32),
        )?;
    }
    // LoopbackAttach.
    driver.command(
        56,
        &packed!(0u32, qp.0, 0u32, 0u32, 0u32, 1u32, 0u32, 0u32, 0u32, 0u32, 0u64),
    )?;

    let Driver { function, .. } = &driver;
    let memory = &function.memory;
    memory.put(DATA, b"hello");
    memory.put(
        RECEIVES,
        &packed!(100u64, 1u16, 0u16, 0u32, 0x100u64, 64u32, stag),
    );
    memory.put(RECORD + 4, &1u32.to_le_bytes());
    function.doorbell(2, qp, 1)?;
    // A Send and an RDMA Write, each in a block of 64 bytes, with a completion.
    memory.put(
        SENDS,
        &packed!(
            0u8, 1u8, 1u8, 1u8, 0u32, 101u64, 0u64, 0u32, 0u32, 0u64, 5u32, stag
        ),
    );
    memory.put(
        SENDS + 64,
        &packed!(
            3u8, 1u8, 1u8, 1u8, 0u32, 102u64, 0x200u64, stag, 0u32, 0u64, 5u32, stag
        ),
    );
    memory.put(RECORD, &2u32.to_le_bytes());
    function.doorbell(1, qp, 2)?;

    for entry in 0..3 {
        let at = CQ + 64 * entry;
        wait(function, || Ok(memory.get::<1>(at + 60)[0] & 1 == 1))?;
        let [cookie, label, length] =
            [at, at + 8, at + 16].map(|field| u32::from_le_bytes(memory.get(field)));
        let status = memory.get::<1>(at + 25)[0];
        println!("completion of request {cookie}: status {status}, {length} B, queue pair {label}");
    }
    let [sent, written]: [[u8; 5]; 2] = [memory.get(DATA + 0x100), memory.get(DATA + 0x200)];
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    println!("received '{}', written '{}'", text(&sent), text(&written));
    match sent == written && sent == *b"hello" {
        true => Ok(()),
        false => Err("other bytes came than were sent".into()),
    }
}
