//! NFSACL version 3: access control lists in addition to NFSv3, at the same ports. It has no RFC;
//! Solaris and Linux implement it.

use crate::acl::{Acl, Entry, MAX_ENTRIES, Tag};
use crate::nfs3::{Attributes, Handle, Status};
use crate::tree::{Acls, Outcome, SetAcls};
use crate::xdr::{BadXdr, Reader, Xdr, record, words};

/// RPC program of NFSACL.
pub const PROGRAM: u32 = 100_227;
/// RPC version of NFSACL.
pub const VERSION: u32 = 3;

/// Mask bit: the access list.
pub const ACCESS: u32 = 1;
/// Mask bit: the number of entries of the access list.
pub const ACCESS_COUNT: u32 = 2;
/// Mask bit: the default list of a directory.
pub const DEFAULT: u32 = 4;
/// Mask bit: the number of entries of the default list.
pub const DEFAULT_COUNT: u32 = 8;

/// Bit in the tags of default lists.
const OF_DEFAULT: u32 = 0x1000;

/// Bytes of an entry.
const ENTRY: usize = 12;

/// Maximum bytes of the results of GETACL.
pub const MAX_RESULTS: usize = 4 + 88 + 4 + 2 * (4 + 4 + MAX_ENTRIES * ENTRY);

words! {
    /// Procedures. Version 2 had two more, which NFSv3 has as its own procedures.
    #[allow(missing_docs)]
    pub enum Procedure { Null = 0, Getacl = 1, Setacl = 2, }
}

record! {
    /// GETACL3args.
    pub struct GetaclArgs {
        /// The file.
        pub file: Handle,
        /// The requested parts: [`ACCESS`], [`ACCESS_COUNT`], [`DEFAULT`], [`DEFAULT_COUNT`].
        pub mask: u32,
    }
}

/// SETACL3args: a file and its new lists.
pub type SetaclArgs = (Handle, Lists);

/// GETACL3resok.
pub type GetaclOk = (Option<Attributes>, Lists);

/// secattr: the access list and the default list, as far as the mask selects them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lists {
    /// The parts that are present.
    pub mask: u32,
    /// The access list.
    pub access: List,
    /// The default list.
    pub default: List,
}

/// The entries of a list, or only their number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct List {
    /// Number of entries.
    pub count: u32,
    /// All entries, or none.
    pub entries: Vec<Entry>,
}

/// Checks that a mask has known bits only.
///
/// # Errors
/// `Invalid` for other bits.
pub const fn check_mask(mask: u32) -> Outcome<()> {
    match mask & !(ACCESS | ACCESS_COUNT | DEFAULT | DEFAULT_COUNT) {
        0 => Ok(()),
        _ => Err(Status::Invalid),
    }
}

impl Lists {
    /// The parts of a file's lists that `mask` selects.
    ///
    /// # Errors
    /// A list is too long.
    pub fn of(file: &Acls, mask: u32, owner: u32, group: u32) -> Outcome<Self> {
        let list = |acl, all, count| {
            let requested = mask & (all | count) != 0;
            let entries = Some(acl)
                .flatten()
                .filter(|_| requested)
                .map(|acl| entries(acl, owner, group));
            let mut entries = entries.unwrap_or_default();
            if entries.len() > MAX_ENTRIES {
                return Err(Status::FileTooBig);
            }
            let count = entries.len() as u32;
            if mask & all == 0 {
                entries.clear();
            }
            Ok(List { count, entries })
        };
        Ok(Self {
            mask,
            access: list(Some(&file.access), ACCESS, ACCESS_COUNT)?,
            default: list(file.default.as_ref(), DEFAULT, DEFAULT_COUNT)?,
        })
    }

    /// The change that a SETACL requests.
    ///
    /// # Errors
    /// The mask has unknown bits, or the entries make no list.
    pub fn change(&self) -> Outcome<SetAcls> {
        check_mask(self.mask)?;
        // A list without entries is removed. Linux sends such an access list for a new directory
        // whose mode is sufficient.
        let list = |bit, list: &List| match &list.entries[..] {
            _ if self.mask & bit == 0 => Ok(None),
            [] => Ok(Some(None)),
            entries => acl(entries).map(|acl| Some(Some(acl))).ok_or(Status::Invalid),
        };
        Ok(SetAcls {
            access: list(ACCESS, &self.access)?,
            default: list(DEFAULT, &self.default)?,
        })
    }
}

/// The entries of a list for the network, where a list always has a mask. A list of three entries
/// gets a mask that permits everything.
fn entries(acl: &Acl, owner: u32, group: u32) -> Vec<Entry> {
    let mut entries = acl.entries(0);
    for entry in &mut entries {
        entry.id = match entry.tag {
            Tag::Owner => owner,
            Tag::OwningGroup => group,
            _ => entry.id,
        };
    }
    if let [_, of_group, _] = entries[..] {
        let (tag, id) = (Tag::Mask, 0);
        entries.insert(2, Entry { tag, id, ..of_group });
    }
    entries
}

/// The list that entries from the network form.
fn acl(entries: &[Entry]) -> Option<Acl> {
    let rights = |tag| {
        entries
            .iter()
            .find(|entry| entry.tag == tag)
            .map(|entry| entry.rights)
    };
    let needless = entries.len() == 4 && rights(Tag::Mask) == rights(Tag::OwningGroup);
    let kept = entries
        .iter()
        .filter(|entry| !(needless && entry.tag == Tag::Mask));
    Acl::new(&kept.copied().collect::<Vec<_>>())
}

impl List {
    fn take(reader: &mut Reader<'_>, wanted: bool) -> Result<Self, BadXdr> {
        let (count, len) = Xdr::take(reader)?;
        if let Some(long) = [count, len].into_iter().find(|len| *len as usize > MAX_ENTRIES) {
            return Err(BadXdr::Length(long));
        }
        let bytes = &mut Reader(reader.bytes(len as usize * ENTRY)?);
        if wanted && count != len {
            return Err(BadXdr::Length(count));
        }
        let entries = (0..len).map(|_| entry(bytes)).collect::<Result<_, _>>()?;
        Ok(Self { count, entries })
    }

    fn put(&self, flag: u32, out: &mut Vec<u8>) {
        (self.count, self.entries.len() as u32).put(out);
        for Entry { tag, id, rights } in &self.entries {
            (*tag as u32 | flag, (*id, *rights)).put(out);
        }
    }
}

fn entry(reader: &mut Reader<'_>) -> Result<Entry, BadXdr> {
    const RIGHTS: u32 = 7;
    let (tag, (id, rights)) = <(u32, (u32, u32))>::take(reader)?;
    let tag = Tag::take(&mut Reader(&(tag & !OF_DEFAULT).to_be_bytes()))?;
    // Masks of Solaris have further bits.
    let rights = if tag == Tag::Mask { rights & RIGHTS } else { rights };
    if rights > RIGHTS {
        return Err(BadXdr::Value(rights));
    }
    Ok(Entry { tag, id, rights })
}

impl Xdr<'_> for Lists {
    fn take(reader: &mut Reader<'_>) -> Result<Self, BadXdr> {
        let mask = u32::take(reader)?;
        Ok(Self {
            mask,
            access: List::take(reader, mask & ACCESS != 0)?,
            default: List::take(reader, mask & DEFAULT != 0)?,
        })
    }

    fn put(&self, out: &mut Vec<u8>) {
        self.mask.put(out);
        self.access.put(0, out);
        self.default.put(OF_DEFAULT, out);
    }
}
