//! READDIR and READDIRPLUS (RFC 1813 §3.3.16, §3.3.17).

use super::export::Export;
use crate::nfs3::{
    Attributes, Handle, Listed, ListedPlus, ReaddirArgs, ReaddirOk, ReaddirplusArgs, Reply, Status,
};
use crate::tree::{Caller, File, Listing, Outcome, PARENT, SELF};
use crate::xdr::{Xdr, padding};
use std::sync::Arc;

/// Maximum bytes of the reply to READDIR or READDIRPLUS.
const MAX_LISTING: u32 = 1 << 20;

/// Arguments of READDIR or READDIRPLUS.
struct Wanted<'a> {
    dir: Handle,
    /// The list begins with the entry after this cookie.
    cookie: u64,
    /// Maximum bytes of names, numbers and cookies.
    names: u32,
    /// Maximum bytes of all results.
    all: u32,
    /// With handles and attributes, as far as this caller may see them. `None` for READDIR.
    plus: Option<&'a Caller>,
}

/// Entries of a reply, as many as fit.
struct Page<'a> {
    out: &'a mut Vec<u8>,
    /// The length that `out` must not exceed.
    end: usize,
    names: usize,
    names_max: usize,
}

impl Page<'_> {
    /// Appends an entry, with the file if the list has handles and attributes. Returns `false` if
    /// it does not fit.
    fn put(&mut self, entry: Listed<'_>, plus: Option<Option<File>>) -> bool {
        let before = self.out.len();
        true.put(self.out);
        match plus {
            None => entry.put(self.out),
            Some(found) => ListedPlus {
                entry,
                attributes: found.map(|(_, attributes)| attributes),
                file: found.map(|(file, _)| file),
            }
            .put(self.out),
        }
        self.names += 24 + entry.name.len() + padding(entry.name.len());
        let fits = self.out.len() <= self.end && self.names <= self.names_max;
        if !fits {
            self.out.truncate(before);
        }
        fits
    }
}

impl Export {
    pub(super) fn readdir(&self, caller: &Caller, args: ReaddirArgs, out: &mut Vec<u8>) {
        let ReaddirArgs {
            dir, cookie, count, ..
        } = args;
        let wanted = Wanted {
            dir,
            cookie,
            names: u32::MAX,
            all: count,
            plus: None,
        };
        self.list(caller, &wanted, out);
    }

    pub(super) fn readdirplus(&self, caller: &Caller, args: ReaddirplusArgs, out: &mut Vec<u8>) {
        let ReaddirplusArgs {
            dir,
            cookie,
            names,
            count,
            ..
        } = args;
        let wanted = Wanted {
            dir,
            cookie,
            names,
            all: count,
            plus: Some(caller),
        };
        self.list(caller, &wanted, out);
    }

    fn list(&self, caller: &Caller, wanted: &Wanted<'_>, out: &mut Vec<u8>) {
        let listing = self.listing(caller, &wanted.dir);
        let attributes = self.after(&wanted.dir);
        match listing {
            Ok(listing) => self.put_list(attributes, &listing, wanted, out),
            Err(status) => (status, attributes).put(out),
        }
    }

    fn listing(&self, caller: &Caller, dir: &Handle) -> Outcome<Arc<Listing>> {
        self.tree.may_list(caller, dir)?;
        self.listings.of(&*self.tree, dir)
    }

    fn put_list(
        &self,
        attributes: Option<Attributes>,
        listing: &Listing,
        wanted: &Wanted<'_>,
        out: &mut Vec<u8>,
    ) {
        let begin = out.len();
        let head = ReaddirOk {
            dir: attributes,
            verifier: [0; 8],
        };
        Reply::<_, ()>::Ok(head).put(out);
        let empty = out.len();
        // The limit does not include the status, but includes the words that end the list.
        let end = begin + 4 + (wanted.all.min(MAX_LISTING) as usize).saturating_sub(8);
        let mut page = Page {
            out,
            end,
            names: 0,
            names_max: wanted.names as usize,
        };
        let complete = self.put_special(wanted, &mut page) && self.put_names(listing, wanted, &mut page);
        if out.len() == empty && !complete {
            out.truncate(begin);
            return (Status::TooSmall, attributes).put(out);
        }
        (false, complete).put(out);
    }

    /// Appends `.` and `..`. Returns `false` if one does not fit.
    fn put_special(&self, wanted: &Wanted<'_>, page: &mut Page<'_>) -> bool {
        for (cookie, name) in [(SELF, &b"."[..]), (PARENT, &b".."[..])] {
            if wanted.cookie >= cookie {
                continue;
            }
            let file = if cookie == SELF {
                Ok(wanted.dir)
            } else {
                self.tree.parent(&wanted.dir)
            };
            let found = file.ok().and_then(|file| Some((file, self.after(&file)?)));
            let entry = Listed {
                fileid: found.map_or(0, |(_, attributes)| attributes.fileid),
                name,
                cookie,
            };
            if !page.put(entry, wanted.plus.map(|_| found)) {
                return false;
            }
        }
        true
    }

    /// Appends the names after the cookie. Returns `false` if one does not fit.
    fn put_names(&self, listing: &Listing, wanted: &Wanted<'_>, page: &mut Page<'_>) -> bool {
        listing.after(wanted.cookie).iter().all(|name| {
            let entry = Listed {
                fileid: name.fileid,
                name: &name.name,
                cookie: name.cookie,
            };
            let find = |caller| self.tree.lookup(caller, &wanted.dir, &name.name).ok();
            page.put(entry, wanted.plus.map(find))
        })
    }
}
