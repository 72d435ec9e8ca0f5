//! A driver whose actions a fuzzer chooses; compiled with `--cfg fuzzing` only.

mod engine_rx;
mod legal;

pub use engine_rx::engine_rx;

use crate::config::ModelConfig;
use crate::testing::mock::{Driver, config};
use crate::testing::sim::{Conditions, SimNetwork};
use crate::time::Nanos;
use legal::Legal;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use urnic_device::command::{Command, Nothing, Opcode, PAYLOAD_LEN};
use urnic_device::registers::STATUS;
use urnic_testkit::Source;

/// Pages of the host's memory that addresses select.
const PAGES: u64 = 2000;
const FIRST_PAGE: u64 = 0x7700_0000_0000;

/// An address, mostly inside the host's memory.
fn address(source: &mut Source<'_>) -> u64 {
    match source.byte() {
        0xff => u64::from(source.word()) << 32 | u64::from(source.word()),
        0xfe => FIRST_PAGE + (64 << 20) - 8,
        byte => FIRST_PAGE + (u64::from(byte) << 3 | u64::from(source.byte()) & 7) % PAGES * 4096,
    }
}

/// An end of a connection in memory that a hostile peer shares: see
/// [`same_host`](crate::stream::same_host::testing::fuzzing::same_host).
pub fn same_host(data: &[u8]) {
    crate::stream::same_host::testing::fuzzing::same_host(data);
}

/// A packet of RoCE v2 that another process passes on.
pub fn roce_forwarded(data: &[u8]) {
    crate::stream::roce_port::fuzz(data);
}

/// Inputs of [`roce_forwarded`] to start from.
pub fn roce_forwarded_seeds() -> Vec<Vec<u8>> {
    crate::stream::roce_port::seeds()
}

/// A command with any opcode and arguments: mostly addresses and small numbers.
fn any_command(source: &mut Source<'_>) -> Command {
    let opcode = Opcode::from_raw(source.byte().into()).unwrap_or(Opcode::QueryDevice);
    let mut command = Command::new(opcode, &Nothing {});
    // Arguments begin with addresses, or with handles.
    let addresses = usize::from(source.byte() % 4) * 8;
    let (pointers, rest) = command.payload.split_at_mut(addresses.min(PAYLOAD_LEN));
    for place in pointers.as_chunks_mut::<8>().0 {
        place.copy_from_slice(&address(source).to_le_bytes());
    }
    for place in rest.as_chunks_mut::<4>().0.iter_mut().take(18) {
        place.copy_from_slice(&source.number().to_le_bytes());
    }
    command.input = address(source).into();
    command.output = address(source).into();
    command.input_len = source.number().into();
    command.output_len = source.number().into();
    command
}

/// Rings any doorbell, in the pages and by the register.
fn ring(driver: &Driver, source: &mut Source<'_>) {
    let (page, slot) = (source.number(), source.byte());
    let value =
        u64::from(source.byte()) << 56 | u64::from(source.number()) << 32 | u64::from(source.number());
    if let Some(pages) = driver.device.doorbell_pages() {
        pages.store(page, u32::from(slot) * 16, value);
    }
    driver.device.scan_doorbells();
    driver.device.doorbell(page, 0, value);
}

/// Commands, requests, doorbells, random writes to rings and records, and unmapped memory, in any
/// order, right and wrong: every command is answered, and the device stays ready.
pub fn commands(data: &[u8]) {
    let network = SimNetwork::new(Conditions::default(), Arc::new(AtomicU64::new(0)));
    let config = ModelConfig {
        doorbell_memory: true,
        ..config()
    };
    let driver = Driver::start_manual_with(config, Arc::new(network));
    let mut legal = Legal::new(&driver);
    // The driver itself uses this memory for its commands.
    let spared = driver.command_memory();
    let free = |iova: u64, len: usize| !spared.contains(&iova) && driver.arena.holds(iova, len);
    let mut source = Source::new(data);
    let mut now = 0;
    while !source.is_empty() {
        match source.byte() % 12 {
            0 | 1 => {
                let command = any_command(&mut source);
                if free(command.output.get(), command.output_len.get() as usize) {
                    let _ = driver.execute(command);
                }
            }
            2..6 => {
                let command = legal.command(&driver, &mut source);
                if let Ok(completion) = driver.execute(command) {
                    legal.made(command.opcode.get(), completion.result());
                }
            }
            6..8 => legal.post(&driver, &mut source),
            8 => ring(&driver, &mut source),
            9 => {
                let offset = u64::from(source.byte()) * 4;
                let (iova, value) = (address(&mut source).wrapping_add(offset), source.word());
                if free(iova, 4) {
                    driver.arena.write(iova, &value.to_le_bytes());
                }
            }
            10 => {
                let (iova, len) = (address(&mut source), u64::from(source.byte()) * 4096);
                if !(iova..iova.saturating_add(len)).contains(&spared.start) {
                    driver.device.unmapped(iova, len);
                }
            }
            _ => now += 1_000_000 * u64::from(source.byte()),
        }
        driver.device.step(Nanos(now));
    }
    assert_eq!(driver.device.bar0_read(STATUS), 1, "the device is still ready");
    let _ = driver.on(Opcode::DestroyQp, legal.end.qp.id);
    driver.device.reset();
}
