//! Tests of the other files over SCTP.

use crate::carrier::testing::over_sctp;

over_sctp! {
    start_up:
        a_request_without_reads_is_a_depth_of_0_at_the_peer
        a_rejection_delivers_its_private_data
        accepting_after_the_initiators_timeout_fails
        a_lost_peer_is_reported_as_one_disconnection
        a_port_in_use_is_replaced_unless_the_program_chose_it;
    lifecycle:
        destroying_a_listener_closes_its_unread_requests
        the_backlog_limits_unread_requests
        an_rnic_rejects_requests_beyond_the_backlog
        bind_takes_the_port_and_connections_wait_for_listen
        a_stream_of_a_closed_listener_is_closed;
    states:
        calls_in_each_state_have_the_kernels_answers
        disconnecting_early_ends_the_connection_when_it_is_made
        disconnecting_before_accept_ends_the_connection_at_accept;
    options:
        a_connection_before_listen_waits_for_a_second;
    ports:
        a_bound_port_is_kept_for_every_source_address
        a_port_from_bind_is_reserved_until_the_id_connects
        an_id_that_only_holds_its_port_accepts_no_connection
        a_shared_port_is_reserved_until_an_id_connects
        ids_with_reuseaddr_share_a_port_until_one_listens;
    own_ports:
        cmp_05_a_silent_peer_gets_three_queries_then_tcp
        a_connection_between_bind_and_listen_waits;
    roce:
        requests_complete_when_delivered
        a_rejection_has_a_reason
        without_a_queue_pair_a_connection_carries_private_data
        an_id_that_is_destroyed_ends_its_exchange;
}
