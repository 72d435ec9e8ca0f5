//! Access control lists of POSIX.1e draft 17: a mode with additional users and groups.

use crate::xdr::words;
use std::collections::BTreeMap;

/// Permissions: [`READ`], [`WRITE`], [`EXECUTE`].
pub type Rights = u32;
/// Permission to read.
pub const READ: Rights = 4;
/// Permission to write.
pub const WRITE: Rights = 2;
/// Permission to execute a file, or to look up names in a directory.
pub const EXECUTE: Rights = 1;
const ALL: Rights = READ | WRITE | EXECUTE;

/// Maximum entries of a list on the network: the limit of Linux.
pub const MAX_ENTRIES: usize = 1024;

/// The identity of an operation. A tree whose process may not act for other users uses the identity
/// of the process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Further groups.
    pub groups: Vec<u32>,
}

impl Caller {
    /// Whether the caller is a member of the group.
    pub fn belongs_to(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }
}

words! {
    /// The users of an entry. The values are the same in extended attributes and on the network.
    pub enum Tag {
        /// The file's owner.
        Owner = 0x01,
        /// The user with this id.
        User = 0x02,
        /// The file's group.
        OwningGroup = 0x04,
        /// The group with this id.
        Group = 0x08,
        /// The limit of the permissions of all entries except owner and other.
        Mask = 0x10,
        /// All other users.
        Other = 0x20,
    }
}

/// An entry of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The users of the entry.
    pub tag: Tag,
    /// The user or group, for tags with an id.
    pub id: u32,
    /// The permissions of these users.
    pub rights: Rights,
}

/// An access control list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl {
    owner: Rights,
    group: Rights,
    other: Rights,
    /// The mask. A list with named users or groups has one.
    mask: Option<Rights>,
    users: BTreeMap<u32, Rights>,
    groups: BTreeMap<u32, Rights>,
}

impl Acl {
    /// The list that is equivalent to a mode.
    pub const fn of_mode(mode: u32) -> Self {
        Self {
            owner: mode >> 6 & ALL,
            group: mode >> 3 & ALL,
            other: mode & ALL,
            mask: None,
            users: BTreeMap::new(),
            groups: BTreeMap::new(),
        }
    }

    /// A list of these entries, in any order. `None` if a required entry is missing, an entry is
    /// present twice, or an id is 2³²−1, which is invalid.
    pub fn new(entries: &[Entry]) -> Option<Self> {
        let (mut owner, mut group, mut other, mut mask) = (None, None, None, None);
        let (mut users, mut groups) = (BTreeMap::new(), BTreeMap::new());
        for Entry { tag, id, rights } in entries {
            let before = match tag {
                Tag::Owner => owner.replace(*rights),
                Tag::User => users.insert(*id, *rights),
                Tag::OwningGroup => group.replace(*rights),
                Tag::Group => groups.insert(*id, *rights),
                Tag::Mask => mask.replace(*rights),
                Tag::Other => other.replace(*rights),
            };
            let nobody = matches!(tag, Tag::User | Tag::Group) && *id == u32::MAX;
            if before.is_some() || nobody || *rights > ALL {
                return None;
            }
        }
        (mask.is_some() || (users.is_empty() && groups.is_empty())).then_some(Self {
            owner: owner?,
            group: group?,
            other: other?,
            mask,
            users,
            groups,
        })
    }

    /// The entries in the order of tags and ids. Entries without an id get `no_id`.
    pub fn entries(&self, no_id: u32) -> Vec<Entry> {
        let one = |tag, rights| (tag, no_id, rights);
        let named = |tag, all: &BTreeMap<u32, Rights>| {
            let all: Vec<_> = all.iter().map(|(id, rights)| (tag, *id, *rights)).collect();
            all
        };
        [one(Tag::Owner, self.owner)]
            .into_iter()
            .chain(named(Tag::User, &self.users))
            .chain([one(Tag::OwningGroup, self.group)])
            .chain(named(Tag::Group, &self.groups))
            .chain(self.mask.map(|rights| one(Tag::Mask, rights)))
            .chain([one(Tag::Other, self.other)])
            .map(|(tag, id, rights)| Entry { tag, id, rights })
            .collect()
    }

    /// Estimate of the bytes that the list has on the heap: a node of a map has room for eleven
    /// entries and is at least half full.
    pub fn weight(&self) -> u64 {
        let named = [self.users.len(), self.groups.len()].map(|len| len as u64);
        named
            .map(|len| if len == 0 { 0 } else { 112 + 22 * len })
            .iter()
            .sum()
    }

    /// The permission bits of a mode. The bits of the group are the limit for all users except
    /// owner and others.
    pub fn mode(&self) -> u32 {
        self.owner << 6 | self.mask.unwrap_or(self.group) << 3 | self.other
    }

    /// Changes the list so that its [`mode`](Self::mode) is `mode`.
    pub fn set_mode(&mut self, mode: u32) {
        self.owner = mode >> 6 & ALL;
        *self.mask.as_mut().unwrap_or(&mut self.group) = mode >> 3 & ALL;
        self.other = mode & ALL;
    }

    /// The list of a new file with `mode` in a directory whose default list is `self`.
    pub fn inherited(&self, mode: u32) -> Self {
        let mut list = self.clone();
        list.set_mode(self.mode() & mode);
        list
    }

    /// Whether one entry permits the caller all `wanted` permissions on a file of this owner and
    /// group.
    pub fn lets(&self, caller: &Caller, owner: u32, group: u32, wanted: Rights) -> bool {
        let masked = |rights: &Rights| rights & self.mask.unwrap_or(ALL) & wanted == wanted;
        if caller.uid == owner {
            return self.owner & wanted == wanted;
        }
        if let Some(rights) = self.users.get(&caller.uid) {
            return masked(rights);
        }
        let own = caller.belongs_to(group).then_some(&self.group);
        let gids = std::iter::once(&caller.gid).chain(&caller.groups);
        let mut member = own
            .into_iter()
            .chain(gids.filter_map(|gid| self.groups.get(gid)))
            .peekable();
        if member.peek().is_some() {
            return member.any(masked);
        }
        self.other & wanted == wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(entries: &[(Tag, u32, Rights)]) -> Option<Acl> {
        let entries = entries.iter();
        Acl::new(
            &entries
                .map(|&(tag, id, rights)| Entry { tag, id, rights })
                .collect::<Vec<_>>(),
        )
    }

    const BASE: [(Tag, u32, Rights); 3] = [(Tag::Owner, 0, 6), (Tag::OwningGroup, 0, 5), (Tag::Other, 0, 1)];

    /// A list with users 10 and 11, groups 20 and 21, and a mask.
    fn named() -> Acl {
        let more = [
            (Tag::User, 10, 7),
            (Tag::User, 11, 0),
            (Tag::Group, 20, 2),
            (Tag::Group, 21, 5),
            (Tag::Mask, 0, 6),
        ];
        list(&[&BASE[..], &more].concat()).expect("a list")
    }

    fn caller(uid: u32, gids: &[u32]) -> Caller {
        Caller {
            uid,
            gid: gids[0],
            groups: gids[1..].to_vec(),
        }
    }

    #[test]
    fn three_entries_equal_a_mode() {
        let list = list(&BASE).expect("a list");
        assert_eq!(list, Acl::of_mode(0o651));
        assert_eq!(list.mode(), 0o651);
        assert_eq!(list.entries(9).len(), 3);
    }

    #[test]
    fn missing_or_duplicate_entries_make_a_list_invalid() {
        for without in 0..3 {
            let mut entries = BASE.to_vec();
            entries.remove(without);
            assert_eq!(list(&entries), None);
        }
        for twice in [
            BASE[0],
            BASE[1],
            BASE[2],
            (Tag::User, 10, 1),
            (Tag::Group, 21, 1),
            (Tag::Mask, 0, 1),
        ] {
            let mut entries = named().entries(0);
            let (tag, id, rights) = twice;
            entries.push(Entry { tag, id, rights });
            assert_eq!(Acl::new(&entries), None, "{twice:?}");
        }
        let masked = [&BASE[..], &[(Tag::Mask, 0, 7)]].concat();
        assert!(list(&masked).is_some());
        for unmasked in [(Tag::User, 10, 1), (Tag::Group, 21, 1)] {
            assert_eq!(list(&[&BASE[..], &[unmasked]].concat()), None);
        }
        assert_eq!(list(&[BASE[0], BASE[1], (Tag::Other, 0, 8)]), None);
        for nobody in [(Tag::User, u32::MAX, 1), (Tag::Group, u32::MAX, 1)] {
            assert_eq!(list(&[&BASE[..], &[(Tag::Mask, 0, 7), nobody]].concat()), None);
        }
    }

    #[test]
    fn the_groups_bits_of_the_mode_are_the_mask() {
        let mut list = named();
        assert_eq!(list.mode(), 0o661);
        list.set_mode(0o750);
        assert_eq!(list.mode(), 0o750);
        let group = list
            .entries(0)
            .into_iter()
            .find(|entry| entry.tag == Tag::OwningGroup);
        assert_eq!(
            group.expect("it is there").rights,
            5,
            "the rights of the group stay after the mask"
        );
        assert_eq!(named().inherited(0o640).mode(), 0o640);
        assert_eq!(named().inherited(0o777).mode(), 0o661);
    }

    /// The file has owner 1 and group 2.
    #[test]
    fn one_entry_decides_and_the_mask_bounds_named_and_group() {
        let list = named();
        let may = |uid, gids: &[u32]| {
            let allowed = |wanted: &Rights| list.lets(&caller(uid, gids), 1, 2, *wanted);
            (1..=7).filter(allowed).collect::<Vec<_>>()
        };
        assert_eq!(may(1, &[20]), [2, 4, 6], "the owner");
        assert_eq!(
            may(10, &[2]),
            [2, 4, 6],
            "a named user whose right to execute is masked"
        );
        assert_eq!(
            may(11, &[2, 21]),
            [0; 0],
            "a named user without rights, in any groups"
        );
        assert_eq!(may(5, &[2]), [4], "the file's group");
        assert_eq!(may(5, &[9, 20]), [2], "a named group");
        assert_eq!(
            may(5, &[20, 21]),
            [2, 4],
            "two groups, neither of which permits read and write together"
        );
        assert_eq!(may(5, &[9]), [1], "any other user");
    }
}
