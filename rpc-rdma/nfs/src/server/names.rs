//! Procedures of NFSv3 on names in directories (RFC 1813 §3.3): LOOKUP, CREATE, REMOVE, RENAME,
//! LINK and similar ones.

use super::export::{Export, answer, data};
use crate::memory::Slice;
use crate::nfs3::{
    Attributes, CreateArgs, Created, Entry, Handle, LinkArgs, LookupOk, MAX_PATH, MkdirArgs, MknodArgs,
    RenameArgs, Status, SymlinkArgs, Wcc,
};
use crate::tree::{Caller, New, Outcome, check_name};
use crate::xdr::{BadXdr, Reader, Xdr};

impl Export {
    pub(super) fn lookup(
        &self,
        caller: &Caller,
        args: &mut Reader<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), BadXdr> {
        let Entry { dir, name } = Xdr::take(args)?;
        let named = match name {
            b"." | b".." => Ok(()),
            _ => check_name(name),
        };
        let found = named.and_then(|()| self.tree.lookup(caller, &dir, name));
        let dir = self.after(&dir);
        let found = found.map(|(file, attributes)| LookupOk {
            file,
            attributes: Some(attributes),
            dir,
        });
        answer(found, |status| (status, dir), out);
        Ok(())
    }

    pub(super) fn create(
        &self,
        caller: &Caller,
        args: &mut Reader<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), BadXdr> {
        let CreateArgs { place, how } = Xdr::take(args)?;
        self.make(place, out, || {
            self.tree.create(caller, &place.dir, place.name, &how)
        });
        Ok(())
    }

    pub(super) fn mkdir(
        &self,
        caller: &Caller,
        args: &mut Reader<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), BadXdr> {
        let MkdirArgs { place, attributes } = Xdr::take(args)?;
        let what = New::Directory(&attributes);
        self.make(place, out, || {
            self.tree.make(caller, &place.dir, place.name, what)
        });
        Ok(())
    }

    pub(super) fn symlink<'a>(
        &self,
        caller: &Caller,
        args: &mut Reader<'a>,
        item: Option<&'a Slice>,
        out: &mut Vec<u8>,
    ) -> Result<(), BadXdr> {
        let SymlinkArgs {
            place,
            attributes,
            len,
        } = Xdr::take(args)?;
        let text = data(item, len, args)?;
        let what = New::Symlink(text.bytes(), &attributes);
        self.make(place, out, || match text.bytes() {
            text if text.len() > MAX_PATH => Err(Status::NameTooLong),
            text if text.is_empty() || text.contains(&0) => Err(Status::Invalid),
            _ => self.tree.make(caller, &place.dir, place.name, what),
        });
        Ok(())
    }

    pub(super) fn mknod(
        &self,
        caller: &Caller,
        args: &mut Reader<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), BadXdr> {
        let MknodArgs { place, what } = Xdr::take(args)?;
        self.make(place, out, || {
            self.tree
                .make(caller, &place.dir, place.name, New::special(&what)?)
        });
        Ok(())
    }

    /// The common part of CREATE, MKDIR, SYMLINK and MKNOD.
    fn make(
        &self,
        place: Entry<'_>,
        out: &mut Vec<u8>,
        make: impl FnOnce() -> Outcome<(Handle, Attributes)>,
    ) {
        let (made, wcc) = self.around(&place.dir, || {
            check_name(place.name)?;
            make()
        });
        let made = made.map(|(file, attributes)| Created {
            file: Some(file),
            attributes: Some(attributes),
            wcc,
        });
        answer(made, |status| (status, wcc), out);
    }

    /// REMOVE, or RMDIR if `directory` is set.
    pub(super) fn remove(
        &self,
        caller: &Caller,
        directory: bool,
        args: &mut Reader<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), BadXdr> {
        let Entry { dir, name } = Xdr::take(args)?;
        let (done, wcc) = self.around(&dir, || {
            check_name(name)?;
            self.tree.remove(caller, &dir, name, directory)
        });
        answer(done.map(|()| wcc), |status| (status, wcc), out);
        Ok(())
    }

    pub(super) fn rename(
        &self,
        caller: &Caller,
        args: &mut Reader<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), BadXdr> {
        let RenameArgs { from, to } = Xdr::take(args)?;
        let before = self.before(&from.dir);
        let (done, to_wcc) = self.around(&to.dir, || {
            check_name(from.name).and_then(|()| check_name(to.name))?;
            self.tree
                .rename(caller, (&from.dir, from.name), (&to.dir, to.name))
        });
        let after = self.after(&from.dir);
        let both = (Wcc { before, after }, to_wcc);
        answer(done.map(|()| both), |status| (status, both), out);
        Ok(())
    }

    pub(super) fn link(
        &self,
        caller: &Caller,
        args: &mut Reader<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), BadXdr> {
        let LinkArgs { file, place } = Xdr::take(args)?;
        let (done, wcc) = self.around(&place.dir, || {
            check_name(place.name)?;
            self.tree.link(caller, &file, &place.dir, place.name)
        });
        let both = (self.after(&file), wcc);
        answer(done.map(|()| both), |status| (status, both), out);
        Ok(())
    }
}
