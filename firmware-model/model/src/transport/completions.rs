//! Completions in batches: a completion queue is locked once for many of them.

use super::params::Env;
use crate::queues::{CompletionQueue, Overflow};
use std::slice;
use std::sync::Arc;
use urnic_device::cqe::Cqe;

/// The most completions that are pushed together.
const BATCH: usize = 32;

/// The completions of one run for one queue. The code that pushes must [`flush`](Self::flush)
/// before the run ends.
#[derive(Debug)]
pub(crate) struct Completions {
    pub(crate) queue: Arc<CompletionQueue>,
    waiting: Vec<Cqe>,
}

impl Completions {
    pub(crate) fn new(queue: Arc<CompletionQueue>) -> Completions {
        Completions {
            queue,
            waiting: Vec::with_capacity(BATCH),
        }
    }

    #[inline(always)]
    pub(crate) fn push(&mut self, mut cqe: Cqe, env: &mut Env<'_>) -> Result<(), Overflow> {
        self.stamp(&mut cqe, env);
        self.waiting.push(cqe);
        match self.waiting.len() {
            BATCH => self.flush(env),
            _ => Ok(()),
        }
    }

    /// Pushes the waiting completions and `cqe`, without a copy of `cqe`.
    #[inline]
    pub(crate) fn push_one(&mut self, mut cqe: Cqe, env: &mut Env<'_>) -> Result<(), Overflow> {
        self.flush(env)?;
        self.stamp(&mut cqe, env);
        self.queue.push(slice::from_ref(&cqe), &env.now, env.effects)
    }

    #[inline]
    fn stamp(&self, cqe: &mut Cqe, env: &Env<'_>) {
        if self.queue.timed {
            cqe.timestamp = env.now.get().0.into();
        }
    }

    #[inline]
    pub(crate) fn flush(&mut self, env: &mut Env<'_>) -> Result<(), Overflow> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let pushed = self.queue.push(&self.waiting, &env.now, env.effects);
        self.waiting.clear();
        pushed
    }
}
