//! The objects that the program has created and not destroyed.

use std::collections::HashMap;
use std::fmt;
use urnic_sync::Mutex;

use crate::call_site::CallSite;

/// The kinds of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    ProtectionDomain,
    MemoryRegion,
    MemoryWindow,
    CompletionQueue,
    QueuePair,
    SharedReceiveQueue,
    AddressHandle,
}

impl Kind {
    /// One, or several.
    pub(crate) fn counted(self, count: usize) -> String {
        let name = match self {
            Kind::ProtectionDomain => "protection domain",
            Kind::MemoryRegion => "memory region",
            Kind::MemoryWindow => "memory window",
            Kind::CompletionQueue => "completion queue",
            Kind::QueuePair => "queue pair",
            Kind::SharedReceiveQueue => "shared receive queue",
            Kind::AddressHandle => "address handle",
        };
        match count {
            1 => format!("1 {name}"),
            _ => format!("{count} {name}s"),
        }
    }
}

/// The objects, by kind and address.
#[derive(Debug, Default)]
pub(crate) struct Objects(Mutex<HashMap<(Kind, usize), CallSite>>);

/// Objects of one kind that one place created.
#[derive(Debug)]
pub(crate) struct Left {
    kind: Kind,
    pub(super) site: CallSite,
    count: usize,
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let were = if self.count == 1 { "was" } else { "were" };
        write!(
            f,
            "{} {were} not destroyed, created",
            self.kind.counted(self.count)
        )
    }
}

impl Left {
    /// Whether it is the protection domain that librdmacm makes for itself and never frees.
    pub(super) fn is_of_librdmacm(&self) -> bool {
        self.kind == Kind::ProtectionDomain && self.site.is_in_librdmacm()
    }
}

impl Objects {
    /// The program created an object, unless `address` is null.
    pub(crate) fn created(&self, kind: Kind, address: usize) {
        if address != 0 {
            self.0.lock().insert((kind, address), CallSite::here());
        }
    }

    /// The program destroyed an object.
    pub(crate) fn destroyed(&self, kind: Kind, address: usize) {
        self.0.lock().remove(&(kind, address));
    }

    /// How many objects of a kind there are.
    pub(crate) fn count(&self, kind: Kind) -> usize {
        self.0.lock().keys().filter(|(known, _)| *known == kind).count()
    }

    /// The objects that are left, by call site.
    pub(super) fn left(&self) -> Vec<Left> {
        let mut places: HashMap<(Kind, CallSite), usize> = HashMap::new();
        for ((kind, _), site) in self.0.lock().iter() {
            *places.entry((*kind, site.clone())).or_default() += 1;
        }
        let all = places.into_iter();
        all.map(|((kind, site), count)| Left { kind, site, count })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remaining_objects_are_counted_by_call_site() {
        let objects = Objects::default();
        for address in 1..=3 {
            objects.created(Kind::MemoryRegion, address);
        }
        objects.created(Kind::QueuePair, 0);
        objects.destroyed(Kind::MemoryRegion, 2);
        assert_eq!(
            (objects.count(Kind::MemoryRegion), objects.count(Kind::QueuePair)),
            (2, 0)
        );
        let left: Vec<String> = objects.left().iter().map(Left::to_string).collect();
        assert_eq!(left, ["2 memory regions were not destroyed, created"]);
    }
}
