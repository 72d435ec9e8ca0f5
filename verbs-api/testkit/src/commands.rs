//! The command queue.

use std::mem::offset_of;
use std::sync::atomic::Ordering;

use urnic_device::command::{COMMAND_LEN, COMPLETION_LEN, Command, Completion};
use zerocopy::IntoBytes;

use crate::memory::Memory;

/// The driver's side of the command queue.
#[derive(Debug)]
pub struct CommandQueue<M> {
    ring: M,
    completions: M,
    log_size: u32,
    producer: u32,
}

impl<M: Memory> CommandQueue<M> {
    /// The offset of the phase word in a completion.
    pub const PHASE: usize = offset_of!(Completion, phase);

    /// An empty queue of `1 << log_size` commands, with the ring of their completions.
    pub fn new(ring: M, completions: M, log_size: u32) -> Self {
        CommandQueue {
            ring,
            completions,
            log_size,
            producer: 0,
        }
    }

    /// The memory of the commands.
    pub fn ring(&self) -> &M {
        &self.ring
    }

    /// The memory of the completions.
    pub fn completions(&self) -> &M {
        &self.completions
    }

    /// The producer index, which is the value of the doorbell.
    pub fn producer(&self) -> u32 {
        self.producer
    }

    /// Starts again at index 0, like a device after a reset; the test zeroes the memory.
    pub fn reset(&mut self) {
        self.producer = 0;
    }

    /// Writes a command, without the doorbell; returns its index.
    pub fn put(&mut self, mut command: Command) -> u32 {
        let at = self.producer;
        command.tag = (at as u16).into();
        let slot = (at & ((1 << self.log_size) - 1)) as usize;
        self.ring.write(slot * COMMAND_LEN, command.as_bytes());
        self.producer = at.wrapping_add(1);
        at
    }

    /// The completion of the command with this index, if the device has written it. Completions
    /// come in any order: this one has the command's tag, in a slot of its lap.
    pub fn completion(&self, at: u32) -> Option<Completion> {
        let phase = !(at >> self.log_size) & 1;
        (0..1usize << self.log_size).find_map(|slot| {
            let begin = slot * COMPLETION_LEN;
            let word = self.completions.word(begin + Self::PHASE);
            let written = word.load(Ordering::Acquire) & 1 == phase;
            let completion: Completion = self.completions.load(begin);
            (written && completion.tag.get() == at as u16).then_some(completion)
        })
    }
}
