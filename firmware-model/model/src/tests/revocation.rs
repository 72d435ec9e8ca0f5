//! Revocation over real TCP, on one thread while another one sends.

use super::one_sided;
use crate::testing::mock::{Driver, Pair, wait_for};
use urnic_device::command::Opcode;
use urnic_device::stream::attach;
use urnic_device::vocabulary::{Access, WcStatus};
use urnic_device::wqe;

const ROUNDS: u64 = 40;
const READS: u64 = 4;
const LEN: u32 = 1 << 18;
/// The bytes that the program writes after the deregistration.
const SECRET: u8 = 0xee;

/// DDP-T-08, SEC-02: at no timing of the two threads does a peer read bytes that were written after
/// `DestroyMr`.
fn reads_race_with_revocation(flags: u32, unmapped: bool) {
    let (near, far) = (Driver::start(), Driver::start());
    let memory = far.arena.alloc((LEN as u64 * READS) as usize);
    for round in 0..ROUNDS {
        let (pair, connecting, accepted) = Pair::prepare(&near, &far);
        let Pair {
            mut initiator,
            responder,
        } = pair;
        near.attach_with(connecting, &initiator.qp, flags | attach::INITIATOR)
            .unwrap();
        far.attach_with(accepted, &responder.qp, flags).unwrap();
        far.arena
            .write(memory, &vec![round as u8; (LEN as u64 * READS) as usize]);
        let source = far
            .register_at(
                responder.pd,
                memory,
                LEN as usize * READS as usize,
                Access::REMOTE_READ,
            )
            .unwrap();
        for n in 0..READS {
            let at = n * u64::from(LEN);
            let mut read = one_sided(wqe::Opcode::Read, n, &responder);
            read.stag = source.stag.into();
            read.remote_offset = (source.iova + at).into();
            initiator.qp.post(&near, read, &[initiator.region.sge(at, LEN)]);
        }
        // Deregisters in the middle of the answers, later in each round.
        let arrived = |at: u64| near.arena.read(initiator.region.iova + at, 1) == [round as u8];
        let until = (round % READS) * u64::from(LEN) + round * 4099 % u64::from(LEN);
        if round > 0 {
            wait_for("part of an answer", || {
                near.device.progress(0);
                arrived(until).then_some(())
            });
        }
        if unmapped {
            far.device.unmapped(memory, 1);
        } else {
            far.on(Opcode::DestroyMr, source.stag).unwrap();
        }
        far.arena
            .write(memory, &vec![SECRET; (LEN as u64 * READS) as usize]);
        let statuses: Vec<_> = (0..READS)
            .map(|_| WcStatus::from_raw(initiator.send_cq.await_completion(&near).status).unwrap())
            .collect();
        // A request that arrives after the revocation ends the stream at once: earlier requests
        // without a complete answer are flushed.
        let failed: Vec<_> = statuses
            .iter()
            .skip_while(|status| **status == WcStatus::Success)
            .collect();
        let refused = failed.iter().filter(|s| ***s == WcStatus::RemAccessErr).count();
        let flushed = failed.iter().filter(|s| ***s == WcStatus::WrFlushErr).count();
        assert_eq!(
            refused,
            usize::from(!failed.is_empty()),
            "round {round}: {statuses:?}"
        );
        assert_eq!(refused + flushed, failed.len(), "round {round}: {statuses:?}");
        let came = near
            .arena
            .read(initiator.region.iova, (LEN as u64 * READS) as usize);
        assert!(!came.contains(&SECRET), "round {round}");
        for (end, driver) in [(&initiator, &near), (&responder, &far)] {
            driver.on(Opcode::DestroyQp, end.qp.id).unwrap();
            driver.on(Opcode::DestroyMr, end.region.stag).unwrap();
        }
        if unmapped {
            far.on(Opcode::DestroyMr, source.stag).unwrap();
        }
        assert_eq!(far.device.core().memory.borrows().count(), 0);
    }
}

#[test]
fn ddp_t_08_reads_race_with_deregistration() {
    reads_race_with_revocation(0, false);
}

#[test]
fn ddp_t_08_reads_with_crc_race_with_deregistration() {
    reads_race_with_revocation(attach::CRC, false);
}

#[test]
fn ddp_t_08_reads_race_with_unmapping() {
    reads_race_with_revocation(0, true);
}
