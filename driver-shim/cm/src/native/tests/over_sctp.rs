//! Tests of the other files over SCTP.

use crate::carrier::testing::over_sctp;

over_sctp! {
    rendezvous:
        the_lower_end_initiates_and_both_open
        a_request_before_rtr_is_parked_and_accepted_at_rtr
        the_higher_end_waits_for_a_request
        revision_1_is_sufficient
        two_queue_pairs_of_one_process_connect
        a_queue_pair_that_names_itself_needs_no_stream
        a_receiver_that_stays_at_rtr_is_connected
        one_connection_results_if_neither_or_both_initiate
        behind_a_one_way_firewall_the_other_end_initiates
        queue_pairs_beyond_256_open_another_listener
        listeners_use_only_the_configured_ports
        a_reset_queue_pair_can_connect_to_another_peer;
    failures:
        an_unknown_number_is_rejected_permanently
        a_queue_pair_bound_to_another_peer_rejects
        an_abandoned_parked_request_is_skipped
        parked_requests_of_other_peers_are_rejected_at_rtr
        parking_is_bounded_in_time_and_requests_are_repeated
        a_send_without_a_peer_fails_after_the_retry_budget
        refused_attempts_back_off
        removing_a_queue_pair_ends_its_start_up;
    forged_requests:
        a_request_without_a_psn_connects_nothing
        a_request_from_another_address_is_refused_unless_allowed
        an_initiator_connects_from_the_address_of_its_gid
        after_a_refused_source_address_the_peer_initiates
        peers_of_one_host_may_use_any_of_its_addresses
        guessed_psns_at_rtr_do_not_keep_out_the_peer
        at_rts_both_psns_must_match
        one_more_request_is_examined_each_second
        another_host_cannot_displace_parked_requests
        a_displaced_parked_request_is_replaced_soon;
    hostile:
        idle_streams_are_limited_and_delay_no_connection
        mpa_s_19_nothing_is_accepted_without_a_queue_pair;
}
