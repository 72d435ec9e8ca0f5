//! A driver that sends random commands.

use crate::config::ModelConfig;
use crate::testing::mock::{Driver, End, config};
use crate::testing::sim::{Conditions, SimNetwork};
use crate::time::Nanos;
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use urnic_device::command::{Command, Nothing, Opcode};
use urnic_device::doorbell::{Doorbell, Kind};
use urnic_device::registers::STATUS;

fn opcode() -> impl Strategy<Value = Opcode> {
    (0u16..64).prop_filter_map("no such command", Opcode::from_raw)
}

/// Words that are often valid arguments of commands.
fn word() -> impl Strategy<Value = u32> {
    prop_oneof![
        6 => 0u32..8,
        1 => Just(12),
        1 => Just(u32::MAX),
        1 => any::<u32>(),
    ]
}

/// Addresses: mostly inside the arena, but not in the command queue, which the test itself uses.
fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => (8u64..2000).prop_map(|page| 0x7700_0000_0000 + page * 4096),
        1 => any::<u64>(),
        1 => Just(0x7700_0000_0000 + (64 << 20) - 8),
    ]
}

#[derive(Debug, Clone)]
enum Act {
    Command {
        opcode: Opcode,
        addresses: [u64; 3],
        words: [u32; 18],
        buffers: (u64, u64, u32),
    },
    Ring {
        kind: u8,
        queue: u32,
        index: u32,
    },
    Scribble {
        at: u64,
        value: u32,
    },
}

fn act() -> impl Strategy<Value = Act> {
    let command = (
        opcode(),
        prop::array::uniform3(address()),
        prop::array::uniform18(word()),
        (address(), address(), 0u32..600),
    );
    prop_oneof![
        4 => command.prop_map(|(opcode, addresses, words, buffers)| {
            Act::Command { opcode, addresses, words, buffers }
        }),
        2 => (1u8..6, 0u32..6, word()).prop_map(|(kind, queue, index)| Act::Ring { kind, queue, index }),
        2 => (address(), word()).prop_map(|(at, value)| Act::Scribble { at, value }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any commands with any arguments, doorbells, and random writes to rings and records: every
    /// command completes, and the device still works.
    #[test]
    fn random_input_harms_only_its_own_device(acts in prop::collection::vec(act(), 1..60)) {
        let clock = Arc::new(AtomicU64::new(0));
        let network = SimNetwork::new(Conditions::default(), clock);
        let with_pages = ModelConfig { doorbell_memory: true, ..config() };
        let driver = Driver::start_manual_with(with_pages, Arc::new(network));
        // Objects that random commands can refer to.
        let end = End::new(&driver);
        let commands = driver.command_memory();
        for (step, act) in acts.into_iter().enumerate() {
            match act {
                Act::Command { opcode, addresses, words, buffers: (input, output, len) } => {
                    let mut command = Command::new(opcode, &Nothing {});
                    let (pointers, rest) = command.payload.split_at_mut(24);
                    for (slot, address) in pointers.chunks_mut(8).zip(addresses) {
                        slot.copy_from_slice(&address.to_le_bytes());
                    }
                    for (slot, word) in rest.chunks_mut(4).zip(words) {
                        slot.copy_from_slice(&word.to_le_bytes());
                    }
                    // Some commands whose first word is a handle get a valid one.
                    if step % 3 == 0 {
                        command.payload[..4].copy_from_slice(&words[0].to_le_bytes());
                    }
                    command.input = input.into();
                    command.output = output.into();
                    command.input_len = len.into();
                    command.output_len = len.into();
                    if !commands.contains(&output) && driver.arena.holds(output, len as usize) {
                        let _ = driver.execute(command);
                    }
                }
                Act::Ring { kind, queue, index } => {
                    if let Some(kind) = Kind::from_raw(kind) {
                        let doorbell = Doorbell { kind, queue, index };
                        driver.device.doorbell_pages().unwrap().store(driver.uar, index & 0xfff, doorbell.encode());
                        driver.device.scan_doorbells();
                    }
                }
                Act::Scribble { at, value } => {
                    if !commands.contains(&at) && driver.arena.holds(at, 4) {
                        driver.arena.write(at, &value.to_le_bytes());
                    }
                }
            }
            driver.device.step(Nanos(step as u64 * 1_000_000));
        }
        prop_assert_eq!(driver.device.bar0_read(STATUS), 1);
        let _ = driver.on(Opcode::DestroyQp, end.qp.id);
        driver.pd();
    }
}
