//! Where faults count from on a connection.

/// Positions of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Origin {
    /// Bytes that passed in either direction.
    pub passed: u64,
    /// Messages that passed in either direction.
    pub messages: u64,
    /// Bytes that were sent.
    pub sent: u64,
}

/// The position from which each fault counts on one connection: the beginning of the connection,
/// or, for a fault that was added later, where the connection was then.
#[derive(Debug, Clone, Default)]
pub struct Origins {
    /// The number of faults that were there when the connection began.
    from_beginning: u64,
    /// The origins of the faults after these, in their order.
    later: Vec<Origin>,
}

impl Origins {
    /// The origins of a connection that begins now, with this number of faults.
    pub(crate) fn beginning(faults: u64) -> Origins {
        Origins {
            from_beginning: faults,
            later: Vec::new(),
        }
    }

    /// The faults that were added since the last call, of so many, count from here on.
    pub(crate) fn note(&mut self, faults: u64, here: Origin) {
        let later = faults.saturating_sub(self.from_beginning) as usize;
        if later > self.later.len() {
            self.later.resize(later, here);
        }
    }

    /// The origin of a fault by its index. `None`: it was added after the last look.
    pub(crate) fn of(&self, fault: u64) -> Option<Origin> {
        match fault.checked_sub(self.from_beginning) {
            None => Some(Origin::default()),
            Some(later) => self.later.get(later as usize).copied(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_counts_from_where_the_connection_was() {
        let at = |sent| Origin {
            sent,
            ..Origin::default()
        };
        let mut origins = Origins::beginning(1);
        origins.note(1, at(10));
        assert_eq!((origins.of(0), origins.of(1)), (Some(at(0)), None));
        origins.note(2, at(20));
        origins.note(4, at(30));
        origins.note(4, at(40));
        let all: Vec<_> = (0..5).map(|fault| origins.of(fault)).collect();
        assert_eq!(all, [Some(at(0)), Some(at(20)), Some(at(30)), Some(at(30)), None]);
    }
}
