//! The rules.

macro_rules! rules {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)*) => {
        /// A rule that a program breaks.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub(crate) enum Rule { $($(#[doc = $doc])+ $name,)* }

        impl Rule {
            /// All rules, in the order of the guide.
            pub(crate) const ALL: &'static [Rule] = &[$(Rule::$name,)*];

            /// The name in the log, the report and suppressions.
            pub(crate) const fn name(self) -> &'static str {
                match self { $(Rule::$name => $text,)* }
            }
        }
    };
}

rules! {
    /// The memory of a request changed before its completion was polled.
    BufferChanged = "buffer-changed",
    /// The memory of a receive was read or written before its completion was polled.
    ReceiveTouched = "receive-touched",
    /// An element of a request names memory that its key does not cover.
    BadLkey = "bad-lkey",
    /// A request completed in error.
    RequestFailed = "request-failed",
    /// A verb that posts returned an error.
    PostRefused = "post-refused",
    /// The send queue is full of requests of which none is signalled.
    NoneSignalled = "none-signalled",
    /// More requests are outstanding than the completion queue has entries.
    CqTooSmall = "cq-too-small",
    /// An event was requested while completions waited, and nothing was polled before the program
    /// waited for it.
    MissedRearm = "missed-rearm",
    /// An object is destroyed before its events are acknowledged.
    EventNotAcknowledged = "event-not-acknowledged",
    /// A message found no receive.
    ReceiveMissing = "receive-missing",
    /// An object is destroyed while others need it.
    DestroyedTooEarly = "destroyed-too-early",
    /// Memory was unmapped while it was registered.
    UnmappedWhileRegistered = "unmapped-while-registered",
    /// The process forked with registered memory, and without `ibv_fork_init`.
    ForkWithoutInit = "fork-without-init",
    /// An object was not destroyed.
    Leak = "leak",
}

impl Rule {
    /// The rule of this name.
    pub(crate) fn named(name: &str) -> Option<Rule> {
        Rule::ALL.iter().copied().find(|rule| rule.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_has_every_rule_in_order() {
        let guide = include_str!("../../../docs/guide/strict.md");
        let section = guide
            .split("\n## ")
            .find(|section| section.starts_with("Rules\n"));
        let rows = section
            .expect("Rules")
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
        let names: Vec<&str> = rows.map(|(name, _)| name).collect();
        let rules: Vec<&str> = Rule::ALL.iter().map(|rule| rule.name()).collect();
        assert_eq!(names, rules);
    }

    #[test]
    fn rules_are_found_by_their_names() {
        for rule in Rule::ALL {
            assert_eq!(Rule::named(rule.name()), Some(*rule));
        }
        assert_eq!(Rule::named("leaks"), None);
    }
}
