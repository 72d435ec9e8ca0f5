//! Properties that hold in any order of events: every byte arrives, no access reaches memory that
//! is not exposed, and no memory or call is left over.

use crate::simulation::{Faults, Job, Random, Simulation};
use proptest::collection::vec;
use proptest::prelude::*;
use urnic_rpc_rdma::PrivateData;

fn len() -> impl Strategy<Value = u32> {
    prop_oneof![0..20_u32, 0..1200_u32, 0..9000_u32]
}

fn job() -> impl Strategy<Value = Job> {
    (vec(len(), 0..3), vec(len(), 0..3), len(), len()).prop_map(|(arguments, results, tail, extra)| Job {
        arguments,
        results,
        // Payload streams consist of whole words.
        tail: tail & !3,
        extra: extra & !3,
    })
}

/// A call that fits into the smallest Send.
fn small() -> impl Strategy<Value = Job> {
    (0..200_u32, 0..200_u32).prop_map(|(tail, extra)| Job {
        arguments: vec![],
        results: vec![],
        tail: tail & !3,
        extra: extra & !3,
    })
}

fn private_data() -> impl Strategy<Value = PrivateData> {
    (any::<bool>(), 1..5_usize, 1..5_usize).prop_map(|(remote_invalidation, send, receive)| PrivateData {
        remote_invalidation,
        send_size: send << 10,
        receive_size: receive << 10,
    })
}

/// Runs a simulation in which both ends call with the same xids.
fn run(
    seed: u64,
    faults: Faults,
    segments: usize,
    private_data: [PrivateData; 2],
    jobs: &[Job],
    back: &[Job],
) -> Simulation {
    let mut simulation = Simulation::new(seed, faults, segments, private_data);
    for (end, jobs) in [jobs, back].into_iter().enumerate() {
        for (xid, job) in jobs.iter().enumerate() {
            simulation.call(end, xid as u32, job);
        }
    }
    simulation.run();
    assert_eq!(simulation.answers, jobs.len() + back.len());
    simulation
}

proptest! {
    #[test]
    fn every_call_is_answered_byte_for_byte(
        seed: u64, segments in 1..5_usize, private_data in [private_data(), private_data()], jobs in vec(job(), 0..20), back in vec(small(), 0..5),
    ) {
        run(seed, Faults { credits: 20, ..Faults::default() }, segments, private_data, &jobs, &back);
    }

    #[test]
    fn rpc_bd_06_connections_may_be_cut_at_any_point(
        seed: u64, cut in 30..300_usize, private_data in [private_data(), private_data()], jobs in vec(job(), 1..10), back in vec(small(), 0..5),
    ) {
        run(seed, Faults { cut, credits: 20, ..Faults::default() }, 3, private_data, &jobs, &back);
    }

    #[test]
    fn rpc_k_10_memory_of_cancelled_calls_is_not_touched(
        seed: u64, private_data in [private_data(), private_data()], jobs in vec(job(), 1..12), back in vec(small(), 0..5),
    ) {
        run(seed, Faults { cancel: 25, cut: 400, ..Faults::default() }, 3, private_data, &jobs, &back);
    }

    #[test]
    fn rpc_e_08_registrations_may_fail_and_releases_too(
        seed: u64, private_data in [private_data(), private_data()], jobs in vec(job(), 1..12),
    ) {
        run(seed, Faults { register: 6, release: 20, ..Faults::default() }, 2, private_data, &jobs, &[]);
    }
}

/// Without this test, the properties above would also hold for ends that avoid the difficult cases.
#[test]
fn the_simulation_covers_every_kind_of_call_and_reply() {
    let private_data = PrivateData {
        remote_invalidation: true,
        ..PrivateData::default()
    };
    let mut random = Random(1);
    let jobs: Vec<_> = (0..200)
        .map(|_| Job {
            arguments: vec![random.below(5000) as u32; random.below(3)],
            results: vec![random.below(5000) as u32; random.below(3)],
            tail: random.below(3000) as u32 & !3,
            extra: random.below(3000) as u32 & !3,
        })
        .collect();
    let simulation = run(7, Faults::default(), 3, [private_data; 2], &jobs, &[]);
    assert!(
        simulation.long.0 > 50 && simulation.long.1 > 50,
        "{:?}",
        simulation.long
    );
    assert!(simulation.invalidated > 100);
    assert_eq!(simulation.refusals, 0);
    let faults = Faults {
        cancel: 10,
        ..Faults::default()
    };
    let simulation = run(8, faults, 3, [private_data; 2], &jobs, &[]);
    assert!(simulation.refusals > 0);
}
