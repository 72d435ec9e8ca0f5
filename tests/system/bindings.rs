//! Bindings of other languages, by their own examples.

use urnic_tests::debian::script;
use urnic_tests::or_skip;
use urnic_tests::program::Program;

#[test]
fn the_ibverbs_crates_loopback_example_runs() {
    let example = or_skip!(script("ibverbs-loopback", &[]));
    let text = Program::new(example).run().success();
    assert!(text.contains("sent") && text.contains("received"), "{text}");
}
