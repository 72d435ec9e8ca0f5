//! The device in another process (`urnic serve`) against the one in the program's own, one right after the other.

use urnic_tests::served::Served;

use crate::ours;

/// Ours and theirs: served, and in the process.
pub(crate) type Both = (Option<f64>, Option<f64>);

fn both(measurement: impl Fn(Option<&str>) -> Option<f64>) -> Both {
    let served = {
        let device = Served::start();
        measurement(Some(&device.device()))
    };
    (served, measurement(None))
}

/// Microseconds from posting a Send on a queue pair that is its own peer to the receive's completion.
pub(crate) fn doorbell_to_cqe() -> Both {
    both(ours::doorbell_to_cqe)
}

/// MiB/s of messages of 1 MiB.
pub(crate) fn bandwidth() -> Both {
    both(|device| ours::bandwidth("ib_write_bw", 1 << 20, 2000, device))
}

/// Millions of messages of 64 bytes per second.
pub(crate) fn messages() -> Both {
    both(|device| ours::messages("ib_send_bw", 64, 500_000, device))
}
