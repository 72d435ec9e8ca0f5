//! NFSACL version 3: access control lists beside NFSv3, at the same ports. No RFC has it; it is what Solaris and Linux do.

use crate::acl::{Acl, Entry, MAX_ENTRIES, Tag};
use crate::nfs3::{Attributes, Handle, Status};
use crate::tree::{Acls, Outcome, SetAcls};
use crate::xdr::{BadXdr, Reader, Xdr, record, words};

/// The RPC program.
pub const PROGRAM: u32 = 100_227;
/// Its version.
pub const VERSION: u32 = 3;

/// Of a mask: the access list.
pub const ACCESS: u32 = 1;
/// How many entries it has.
pub const ACCESS_COUNT: u32 = 2;
/// The default list, of a directory.
pub const DEFAULT: u32 = 4;
/// How many entries it has.
pub const DEFAULT_COUNT: u32 = 8;

/// What the tags of default lists have besides.
const OF_DEFAULT: u32 = 0x1000;

/// Bytes of an entry.
const ENTRY: usize = 12;

/// Bytes of GETACL's results, at most.
pub const MAX_RESULTS: usize = 4 + 88 + 4 + 2 * (4 + 4 + MAX_ENTRIES * ENTRY);

words! {
    /// Procedures. Version 2 had two more; NFSv3 has these itself.
    #[allow(missing_docs)]
    pub enum Procedure { Null = 0, Getacl = 1, Setacl = 2, }
}

record! {
    /// GETACL3args.
    pub struct GetaclArgs {
        /// Which file.
        pub file: Handle,
        /// What is asked.
        pub mask: u32,
    }
}

/// SETACL3args: a file, and its lists to be.
pub type SetaclArgs = (Handle, Lists);

/// GETACL3resok.
pub type GetaclOk = (Option<Attributes>, Lists);

/// secattr: two lists, as far as the mask has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lists {
    /// What is in here.
    pub mask: u32,
    /// The access list.
    pub access: List,
    /// The default list.
    pub default: List,
}

/// Entries, or how many there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct List {
    /// So many there are.
    pub count: u32,
    /// All of them, or none.
    pub entries: Vec<Entry>,
}

/// Is a mask of what there is?
///
/// # Errors
/// No.
pub const fn check_mask(mask: u32) -> Outcome<()> {
    match mask & !(ACCESS | ACCESS_COUNT | DEFAULT | DEFAULT_COUNT) {
        0 => Ok(()),
        _ => Err(Status::Invalid),
    }
}

impl Lists {
    /// What `mask` asks for of a file's lists.
    ///
    /// # Errors
    /// One is too long.
    pub fn of(file: &Acls, mask: u32, owner: u32, group: u32) -> Outcome<Self> {
        let list = |acl, all, count| {
            let asked = mask & (all | count) != 0;
            let entries = Some(acl)
                .flatten()
                .filter(|_| asked)
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

    /// What is to be set.
    ///
    /// # Errors
    /// The mask asks for what there is not, or the entries make no list.
    pub fn change(&self) -> Outcome<SetAcls> {
        check_mask(self.mask)?;
        // Without entries it goes. Linux sends an access list so when it makes a directory whose mode says all.
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

/// A list for the wire, where a mask is always: three entries get one that takes nothing away.
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

/// A list off the wire.
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
        let octets = &mut Reader(reader.octets(len as usize * ENTRY)?);
        if wanted && count != len {
            return Err(BadXdr::Length(count));
        }
        let entries = (0..len).map(|_| entry(octets)).collect::<Result<_, _>>()?;
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
    // Solaris has further bits in masks.
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
