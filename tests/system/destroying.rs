//! Queues that one thread destroys while another thread has not returned from the call that caused
//! the completion.

use std::time::Duration;

use urnic_tests::program::Program;
use urnic_tests::served::in_process;
use urnic_tests::{compiled, or_skip};

/// Each round maps and unmaps much memory.
const LIMIT: Duration = Duration::from_secs(300);

fn destroy_during(call: &str, identity: &str) {
    or_skip!(in_process("the device works on the thread that calls"));
    let program = or_skip!(compiled("destroyed_while_posting"));
    let program = Program::new(program).arg(call).env("URNIC_IDENTITY", identity);
    let ended = program.run_for(LIMIT);
    assert!(ended.ok() && ended.output == "destroyed\n", "{ended}");
}

#[test]
fn a_send_may_be_the_last_of_its_queue_pair() {
    destroy_during("ibv_post_send", "iwarp");
}

#[test]
fn a_built_send_may_be_the_last_of_its_queue_pair() {
    destroy_during("ibv_wr_complete", "iwarp");
}

#[test]
fn a_receive_may_be_the_last_of_its_queue_pair() {
    destroy_during("ibv_post_recv", "iwarp");
}

#[test]
fn a_receive_may_be_the_last_of_its_shared_queue() {
    destroy_during("ibv_post_srq_recv", "iwarp");
}

/// With the identity of a RoCE NIC a request for an event covers earlier completions.
#[test]
fn a_request_for_an_event_may_be_the_last_of_its_queue() {
    destroy_during("ibv_req_notify_cq", "roce");
}
