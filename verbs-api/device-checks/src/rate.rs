//! Measures the requests per second of a device with two methods of notification, for `make bench`.

use std::sync::Arc;
use std::time::Instant;

use urnic_device::bus::Bus;
use urnic_device::cqe::Cqe;
use urnic_device::registers::KICK;
use urnic_device::vocabulary::WcStatus;
use urnic_device::wqe::{Opcode, SendFlags, SendHeader};
use urnic_testkit::request;
use zerocopy::IntoBytes;

use crate::connection::{pair, works};
use crate::outcome::{Failure, Outcome, ensure};
use crate::rig::{Line, Rig};

/// Length of each message in bytes.
const LEN: u32 = 64;
/// Number of requests for each completion.
const SIGNALED_EVERY: u64 = 16;

/// How the driver notifies the device of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ringing {
    /// As in normal drivers: a doorbell if the request passes the event index, a kick only if the
    /// device sleeps.
    Shadow,
    /// A doorbell and a write of `KICK` for each request.
    Each,
}

/// Measures the RDMA Writes of 64 bytes per second between two queue pairs. The caller must not use
/// the device otherwise.
///
/// # Errors
/// The reason in words, if the device fails or does not support the measurement.
pub fn writes_per_second(bus: &Arc<dyn Bus>, ringing: Ringing, count: u64) -> Result<f64, String> {
    let line = Line::on(&**bus);
    let measured = Rig::start(bus, &line).and_then(|rig| {
        let measured = measure(&rig, ringing, count);
        rig.stop().and(measured)
    });
    measured.map_err(|failure| match failure {
        Failure::Failed(reason) | Failure::NotHere(reason) => reason,
    })
}

fn measure(rig: &Rig, ringing: Ringing, count: u64) -> Outcome<f64> {
    let (near, far) = pair(rig)?;
    works(rig, &near, &far)?;
    let (from, to) = ([near.region.sge(0, LEN)], far.region.sge(0, LEN));
    let number_of = |cqe: Cqe| -> Outcome<u64> {
        let status = WcStatus::from_raw(cqe.status);
        ensure!(status == Some(WcStatus::Success), "a Write ended with {status:?}");
        Ok(cqe.cookie.get())
    };
    let mut completed = 0;
    let start = Instant::now();
    for number in 1..=count {
        if near.qp.room() == 0 {
            rig.wait("room in the send queue", || (near.qp.room() > 0).then_some(()))?;
        }
        let signaled = number % SIGNALED_EVERY == 0 || number == count;
        // A fast device never fills the send queue, but its completions must be consumed all the
        // same.
        while signaled && let Some(cqe) = near.qp.send_cq.poll() {
            completed = number_of(cqe)?;
        }
        let header = SendHeader {
            flags: if signaled { SendFlags::SIGNALED.bits() } else { 0 },
            remote_offset: to.offset,
            stag: to.stag,
            ..request(Opcode::Write, number)
        };
        near.qp.post(rig, header, from.as_bytes(), from.len());
        if ringing == Ringing::Each {
            near.qp.ring_sends(rig);
            rig.bus.write32(KICK, 1);
        }
    }
    while completed < count {
        completed = number_of(near.qp.send_cq.next(rig)?)?;
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}
