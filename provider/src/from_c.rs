//! The arguments of C for the verbs, as safe types, and the results of the verbs.
//!
//! libibverbs and the program call this provider by C functions, and the manual page of each states
//! its arguments: live objects, structures that can be read or written, lists of a length. Each
//! type here, and each implementation of [`FromC`] in other files, states one such promise.
//! `called_by_c` defines the C functions: only there does a value of C become such a type, and the
//! verbs themselves are safe functions.
//!
//! Work requests and lists in a program's memory may be in packed structs. C compilers on x86-64
//! and arm64 read such structs, and so do other providers; a Rust reference to them would be
//! undefined behaviour, so they are copied, or read as [`Unalign`].

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{ptr, slice};

use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use urnic_device::wqe::Opcode;
use urnic_driver::Refusal;
use urnic_rdma_core::{
    IBV_SEND_INLINE, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_BIND_MW,
    IBV_WR_LOCAL_INV, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND,
    IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_INV, ibv_ah, ibv_context, ibv_cq, ibv_data_buf, ibv_mw,
    ibv_mw_bind_info, ibv_pd, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_send_wr_atomic, ibv_send_wr_bind_mw,
    ibv_send_wr_rdma, ibv_sge, ibv_srq, verbs_cq, verbs_qp, verbs_srq,
};
use zerocopy::Unalign;

use crate::guard::{pointer, status};
use crate::refusals::reported;

/// A parameter of a verb, made of one value of C, or of a pointer and a length.
pub(crate) trait FromC<C>: Sized {
    /// # Safety
    /// `given` is what the documentation of the implementation says, until the verb returns.
    unsafe fn from_c(given: C) -> Self;
}

/// The answer of a verb.
pub(crate) trait Answer<C> {
    /// Runs the verb of this name, and turns its answer into that of C.
    fn answer(name: &'static str, verb: impl FnOnce() -> Self) -> C;
}

/// Defines a C function that calls a verb. Each argument of the verb is a C argument, or a pair of
/// a pointer and a length.
macro_rules! called_by_c {
    ($name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $($verb:ident)::+($($given:expr),*)) => {
        #[allow(unused_variables)]
        unsafe extern "C" fn $name($($arg: $ty),*) $(-> $ret)? {
            $crate::from_c::Answer::answer(stringify!($name), || $($verb)::+(
                // SAFETY: C calls the function as its manual page says, which is what the types of
                // the verb's parameters require of their arguments.
                $(unsafe { $crate::from_c::FromC::from_c($given) }),*
            ))
        }
    };
}

/// Defines a function that sets operations of a context: one line for each, the C function and the
/// verb that it calls.
macro_rules! operations {
    ($(#[$doc:meta])* $vis:vis fn $set:ident; $($name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $($verb:ident)::+($($given:tt)*);)*) => {
        $(#[$doc])*
        $vis fn $set(operations: ContextOps) -> ContextOps {
            $($crate::from_c::called_by_c! { $name($($arg: $ty),*) $(-> $ret)? = $($verb)::+($($given)*) })*
            operations$(.$name($name))*
        }
    };
}

/// Defines a function that sets the functions in a structure of this type: one line for each, the
/// C function and the verb that it calls.
macro_rules! functions {
    ($(#[$doc:meta])* $vis:vis fn $set:ident($object:ty); $($name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $($verb:ident)::+($($given:tt)*);)*) => {
        $(#[$doc])*
        $vis fn $set(object: &mut $object) {
            $($crate::from_c::called_by_c! { $name($($arg: $ty),*) $(-> $ret)? = $($verb)::+($($given)*) })*
            $(object.$name = Some($name);)*
        }
    };
}

pub(crate) use {called_by_c, functions, operations};

/// A number, or a pointer that the verb only passes on.
impl<T> FromC<T> for T {
    #[inline(always)]
    unsafe fn from_c(given: T) -> T {
        given
    }
}

/// A type whose values are where C has a `C`.
///
/// # Safety
/// A pointer to a `Self` is a pointer to a `C`, and each `C` that C gives to this provider is part
/// of a `Self`.
pub(crate) unsafe trait At<C> {}

// SAFETY: the types are the same.
unsafe impl<T> At<T> for T {}

/// An object of this provider, or a structure of the program that only this call writes, if any
/// does. It is live.
impl<'a, C, T: At<C>> FromC<*mut C> for &'a T {
    #[inline(always)]
    unsafe fn from_c(given: *mut C) -> &'a T {
        // SAFETY: the caller promises a live `C`, which is at the address of a `T`.
        unsafe { &*given.cast::<T>() }
    }
}

/// Null, or as the type states.
impl<T, P: FromC<*mut T>> FromC<*mut T> for Option<P> {
    #[inline(always)]
    unsafe fn from_c(given: *mut T) -> Option<P> {
        // SAFETY: the caller promises this of a pointer that is not null.
        (!given.is_null()).then(|| unsafe { P::from_c(given) })
    }
}

/// Null, or as the type states.
impl<T, P: FromC<*const T>> FromC<*const T> for Option<P> {
    unsafe fn from_c(given: *const T) -> Option<P> {
        // SAFETY: the caller promises this of a pointer that is not null.
        (!given.is_null()).then(|| unsafe { P::from_c(given) })
    }
}

/// A descriptor that stays open during the call, or a negative number.
impl<'a> FromC<c_int> for Option<BorrowedFd<'a>> {
    unsafe fn from_c(given: c_int) -> Option<BorrowedFd<'a>> {
        // SAFETY: the caller promises an open descriptor, if it is one.
        (given >= 0).then(|| unsafe { BorrowedFd::borrow_raw(given) })
    }
}

/// Defines the objects of this provider: for each type those of C that are at its address, as its
/// first field `abi`.
macro_rules! objects {
    ($($object:ty: $($c:ty),+;)*) => { $(
        const _: () = assert!(std::mem::offset_of!($object, abi) == 0);
        // SAFETY: `abi` is the first field, as checked above, and it begins with the structures of
        // C. The provider gives C no other pointer to such a structure.
        $(unsafe impl $crate::from_c::At<$c> for $object {})+
    )* };
}

/// Defines, for structures of attributes, the fields that are pointers to objects, which may be
/// null. A field with a mask is valid if `comp_mask` contains it.
macro_rules! pointers {
    ($($attributes:ty { $($field:ident: $object:ty $(, if $mask:ident)?;)+ })*) => { $(
        impl<'a> $crate::from_c::Given<'a, $attributes> {
            $(
                pub(crate) fn $field(&self) -> Option<&'a $object> {
                    $(if self.comp_mask & $mask == 0 { return None; })?
                    // SAFETY: the promise of `Given`.
                    unsafe { $crate::from_c::FromC::from_c((**self).$field) }
                }
            )+
        }
    )* };
}

pub(crate) use {objects, pointers};

/// A structure of the program, which the verb may change, with pointers to live objects.
pub(crate) struct Given<'a, T>(*mut T, PhantomData<&'a mut T>);

/// A live structure; if the verb changes it, no other thread uses it during the call. Those of its
/// pointers to objects that are valid by its `comp_mask` are null or lead to live objects.
impl<T> FromC<*mut T> for Given<'_, T> {
    unsafe fn from_c(given: *mut T) -> Self {
        Given(given, PhantomData)
    }
}

impl<T> Deref for Given<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the promise of this type.
        unsafe { &*self.0 }
    }
}

impl<T> DerefMut for Given<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the promise of this type.
        unsafe { &mut *self.0 }
    }
}

/// A copy of a structure of the program.
pub(crate) struct Copied<T>(pub(crate) T);

/// A structure that can be read, at any address.
impl<T: Copy> FromC<*const T> for Copied<T> {
    unsafe fn from_c(given: *const T) -> Copied<T> {
        // SAFETY: the caller promises a structure that can be read.
        Copied(unsafe { given.read_unaligned() })
    }
}

/// A variable of the program that the verb sets.
pub(crate) struct Out<'a, T>(*mut T, PhantomData<&'a mut T>);

/// A variable that can be written, at any address.
impl<T> FromC<*mut T> for Out<'_, T> {
    #[inline(always)]
    unsafe fn from_c(given: *mut T) -> Self {
        Out(given, PhantomData)
    }
}

impl<T> Out<'_, T> {
    #[inline]
    pub(crate) fn set(&mut self, value: T) {
        // SAFETY: the promise of this type.
        unsafe { self.0.write_unaligned(value) };
    }
}

/// Writes the part of a structure that fits, and zeroes after it: the program's may be shorter or
/// longer than this provider's.
pub(crate) fn set_prefix<T>(room: &mut [MaybeUninit<u8>], value: &T) {
    let known = room.len().min(size_of::<T>());
    let (first, rest) = room.split_at_mut(known);
    // SAFETY: `first` is no longer than a `T`, and separate from it.
    unsafe {
        first
            .as_mut_ptr()
            .copy_from_nonoverlapping(ptr::from_ref(value).cast(), known)
    };
    rest.fill(MaybeUninit::new(0));
}

/// Room of the program for a number of values.
pub(crate) struct Room<'a, T> {
    next: *mut T,
    left: usize,
    memory: PhantomData<&'a mut T>,
}

/// An array, at any address, of that many values; a negative number is 0.
impl<T> FromC<(*mut T, c_int)> for Room<'_, T> {
    #[inline(always)]
    unsafe fn from_c((next, left): (*mut T, c_int)) -> Self {
        Room {
            next,
            left: usize::try_from(left).unwrap_or(0),
            memory: PhantomData,
        }
    }
}

impl<T> Room<'_, T> {
    /// The same memory, which another function fills.
    #[inline(always)]
    pub(crate) fn again(&mut self) -> Room<'_, T> {
        Room { ..*self }
    }

    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.left == 0
    }

    /// Puts a value into the next place, if there is one.
    #[inline]
    pub(crate) fn push(&mut self, value: T) {
        if self.left == 0 {
            return;
        }
        // SAFETY: the promise of this type: there is at least one more place.
        unsafe {
            self.next.write_unaligned(value);
            self.next = self.next.add(1);
        }
        self.left -= 1;
    }
}

/// A list of that many elements, at any address, which no thread changes during the call. For no
/// elements any pointer is valid.
impl<'a, T> FromC<(*const T, usize)> for &'a [Unalign<T>] {
    #[inline(always)]
    unsafe fn from_c((list, count): (*const T, usize)) -> &'a [Unalign<T>] {
        if count == 0 {
            return &[];
        }
        // SAFETY: the caller promises `count` elements; an `Unalign` has the layout of its value,
        // at any address.
        unsafe { slice::from_raw_parts(list.cast(), count) }
    }
}

/// Bytes of the program, of which nothing is said before [`bytes`](Self::bytes).
#[derive(Clone, Copy)]
pub(crate) struct Data<'a> {
    start: *const u8,
    len: usize,
    memory: PhantomData<&'a [u8]>,
}

/// That many bytes that can be read, which no thread changes during the call; bytes beyond those
/// that the verb takes need not exist.
impl FromC<(*const c_void, usize)> for Data<'_> {
    #[inline(always)]
    unsafe fn from_c((start, len): (*const c_void, usize)) -> Self {
        Data {
            start: start.cast(),
            len,
            memory: PhantomData,
        }
    }
}

impl<'a> Data<'a> {
    #[inline(always)]
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// The bytes; for a length that the verb takes.
    #[inline(always)]
    pub(crate) fn bytes(self) -> &'a [u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the promise of this type.
        unsafe { slice::from_raw_parts(self.start, self.len) }
    }
}

/// Pieces of data of the program.
pub(crate) struct Pieces<'a>(&'a [Unalign<ibv_data_buf>]);

/// A list of that many elements, at any address, each of which has bytes that can be read. No
/// thread changes them during the call.
impl FromC<(*const ibv_data_buf, usize)> for Pieces<'_> {
    unsafe fn from_c(given: (*const ibv_data_buf, usize)) -> Self {
        // SAFETY: the caller promises this list.
        Pieces(unsafe { FromC::from_c(given) })
    }
}

impl<'a> Pieces<'a> {
    pub(crate) fn iter(&self) -> impl Iterator<Item = Data<'a>> {
        // SAFETY: the promise of this type: these bytes can be read.
        let bytes = |buf: ibv_data_buf| unsafe { FromC::from_c((buf.addr.cast_const(), buf.length)) };
        self.0.iter().map(move |buf| bytes(buf.get()))
    }
}

/// Memory of the program that the verb fills, of which nothing is said before
/// [`bytes`](Self::bytes).
pub(crate) struct Buffer<'a> {
    start: *mut c_void,
    len: usize,
    memory: PhantomData<&'a mut [u8]>,
}

/// That many bytes that can be written; bytes beyond those that the verb takes need not exist.
impl FromC<(*mut c_void, usize)> for Buffer<'_> {
    unsafe fn from_c((start, len): (*mut c_void, usize)) -> Self {
        Buffer {
            start,
            len,
            memory: PhantomData,
        }
    }
}

impl<'a> Buffer<'a> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The bytes; for a length that the verb takes.
    pub(crate) fn bytes(self) -> &'a mut [MaybeUninit<u8>] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: the promise of this type.
        unsafe { slice::from_raw_parts_mut(self.start.cast(), self.len) }
    }
}

/// A work request.
pub(crate) trait WorkRequest: Copy {
    /// The next request, or null.
    fn next(&self) -> *mut Self;
    /// The list of elements, and their number.
    fn list(&self) -> (*const ibv_sge, c_int);
}

macro_rules! work_requests {
    ($($request:ty)*) => { $(
        impl WorkRequest for $request {
            #[inline(always)]
            fn next(&self) -> *mut Self {
                self.next
            }

            #[inline(always)]
            fn list(&self) -> (*const ibv_sge, c_int) {
                (self.sg_list, self.num_sge)
            }
        }
    )* };
}

work_requests! { ibv_send_wr ibv_recv_wr }

/// A list of work requests.
pub(crate) struct Requests<'a, T> {
    /// The request that [`Requests::take`] returned last, or the first one.
    current: *mut T,
    following: *mut T,
    /// The copy of a request that is not aligned.
    copy: MaybeUninit<T>,
    list: PhantomData<&'a T>,
}

/// A list of work requests as `ibv_post_send(3)` or `ibv_post_recv(3)` takes it, at any addresses:
/// each has the fields that its opcode requires, with null or a live window, an element list that
/// can be read, and null or the next request. No thread changes the list during the call.
impl<T> FromC<*mut T> for Requests<'_, T> {
    #[inline(always)]
    unsafe fn from_c(first: *mut T) -> Self {
        Requests {
            current: first,
            following: first,
            copy: MaybeUninit::uninit(),
            list: PhantomData,
        }
    }
}

impl<T: WorkRequest> Requests<'_, T> {
    /// Takes the next request.
    #[inline(always)]
    pub(crate) fn take(&mut self) -> Option<Request<'_, T>> {
        self.current = self.following;
        let request = if self.current.is_aligned() {
            // SAFETY: aligned, and by the promise of this type null or a request.
            unsafe { self.current.as_ref() }?
        } else {
            // SAFETY: null is aligned, so by the promise of this type a request.
            self.copy.write(unsafe { self.current.read_unaligned() })
        };
        self.following = request.next();
        Some(Request(request))
    }

    /// `num_sge` of the request that was taken last; for a refusal, so that the request itself need
    /// not be kept.
    #[cold]
    pub(crate) fn last_count(&self) -> c_int {
        if self.current.is_null() {
            return 0;
        }
        // SAFETY: not null, so by the promise of this type a request.
        unsafe { self.current.read_unaligned() }.list().1
    }

    /// Lets `bad` lead to the request that was taken last, which is the first that is not posted.
    #[inline]
    pub(crate) fn refused_at(&self, bad: Option<Out<'_, *mut T>>) {
        if let Some(mut bad) = bad {
            bad.set(self.current);
        }
    }

    /// Returns the error number of a list of which not all is posted: `bad` then leads to the
    /// request that was taken last, or to the first one if none was.
    #[cold]
    pub(crate) fn refuse(&self, bad: Option<Out<'_, *mut T>>, errno: Errno) -> c_int {
        self.refused_at(bad);
        errno.raw_os_error()
    }
}

/// A work request that was posted as [`Requests`] states.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a, T>(&'a T);

impl<T> Deref for Request<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        self.0
    }
}

impl<'a, T: WorkRequest> Request<'a, T> {
    /// The request's elements; `None` if there are more than `most`, or a negative number.
    #[inline(always)]
    pub(crate) fn elements(self, most: u32) -> Option<&'a [Unalign<ibv_sge>]> {
        let (list, count) = self.0.list();
        let count = u32::try_from(count).ok().filter(|count| *count <= most)?;
        // SAFETY: the promise of `Requests`: a list of this length.
        Some(unsafe { FromC::from_c((list, count as usize)) })
    }
}

/// The operands of a request.
#[derive(Clone, Copy)]
pub(crate) enum Operands<'a> {
    /// Of a Send: data.
    Message,
    /// Of a Write or a Read: the peer's memory, and data or room for it.
    Rdma(ibv_send_wr_rdma),
    /// Of an atomic: the peer's memory, two numbers, and room for the old value.
    Atomic(ibv_send_wr_atomic),
    /// Of a bind: the key in the window's structure, its new key and its memory.
    Bind(&'a AtomicU32, u32, Bind),
    /// Of an invalidation: the STag only.
    Invalidate,
}

/// The key of a window after a bind, instead of `present`: the program chooses the low byte only,
/// and other bits of `rkey` have no meaning.
pub(crate) fn key_of(present: u32, rkey: u32) -> u32 {
    present & !0xff | rkey & 0xff
}

/// The memory of a window.
#[derive(Clone, Copy)]
pub(crate) struct Bind {
    /// The region's key; 0 without a region.
    pub(crate) lkey: u32,
    pub(crate) addr: u64,
    pub(crate) length: u64,
    pub(crate) access: u32,
}

/// A structure that can be read, at any address, whose region is null or live.
impl FromC<*const ibv_mw_bind_info> for Bind {
    unsafe fn from_c(given: *const ibv_mw_bind_info) -> Bind {
        // SAFETY: the caller promises such a structure.
        unsafe {
            let info = given.read_unaligned();
            Bind {
                lkey: info.mr.as_ref().map_or(0, |mr| mr.lkey),
                addr: info.addr,
                length: info.length,
                access: info.mw_access_flags,
            }
        }
    }
}

impl<'a> Request<'a, ibv_send_wr> {
    #[inline(always)]
    pub(crate) fn is_inline(self) -> bool {
        self.send_flags & IBV_SEND_INLINE != 0
    }

    /// The bytes of an inline request's elements. Nothing for another request, and for one with
    /// more than `most` elements.
    #[inline(always)]
    pub(crate) fn inline_data(self, most: u32) -> impl Iterator<Item = Data<'a>> {
        let list = self.elements(most).filter(|_| self.is_inline());
        // SAFETY: the promise of `Requests`: an inline request's elements can be read.
        let bytes = |sge: ibv_sge| unsafe { FromC::from_c((sge.addr as *const c_void, sge.length as usize)) };
        list.unwrap_or_default().iter().map(move |sge| bytes(sge.get()))
    }

    /// The request's operation and operands; `None` for an opcode that no queue pair has.
    #[inline(always)]
    pub(crate) fn operation(self) -> Option<(Opcode, Operands<'a>)> {
        // SAFETY: the promise of `Requests`: the opcode says which member of a union is filled, and
        // a window is live.
        Some(unsafe {
            match self.opcode {
                IBV_WR_SEND => (Opcode::Send, Operands::Message),
                IBV_WR_RDMA_WRITE => (Opcode::Write, Operands::Rdma(self.wr.rdma)),
                IBV_WR_RDMA_READ => (Opcode::Read, Operands::Rdma(self.wr.rdma)),
                IBV_WR_SEND_WITH_IMM => (Opcode::SendImm, Operands::Message),
                IBV_WR_RDMA_WRITE_WITH_IMM => (Opcode::WriteImm, Operands::Rdma(self.wr.rdma)),
                IBV_WR_SEND_WITH_INV => (Opcode::SendInv, Operands::Message),
                IBV_WR_ATOMIC_CMP_AND_SWP => (Opcode::CompareSwap, Operands::Atomic(self.wr.atomic)),
                IBV_WR_ATOMIC_FETCH_AND_ADD => (Opcode::FetchAdd, Operands::Atomic(self.wr.atomic)),
                IBV_WR_LOCAL_INV => (Opcode::LocalInv, Operands::Invalidate),
                IBV_WR_BIND_MW => {
                    let ibv_send_wr_bind_mw { mw, rkey, bind_info } = self.extra.bind_mw;
                    let memory = Bind::from_c(&raw const bind_info);
                    let window = NonNull::new(mw)?.as_ptr();
                    // Threads that bind one window at the same time get one of the keys.
                    let key = AtomicU32::from_ptr(&raw mut (*window).rkey);
                    let new = key_of(key.load(Ordering::Relaxed), rkey);
                    (Opcode::BindMw, Operands::Bind(key, new, memory))
                }
                _ => return None,
            }
        })
    }

    /// The peer of a request for a datagram: its address, its number and its key; `None` without an
    /// address handle.
    ///
    /// # Safety
    /// The request was posted on a queue pair for datagrams.
    #[inline(always)]
    pub(crate) unsafe fn peer<H: At<ibv_ah>>(self) -> Option<(&'a H, u32, u32)> {
        // SAFETY: on such a queue pair, requests fill `ud`, with null or a live address handle.
        unsafe {
            let ud = self.wr.ud;
            let handle: Option<&H> = FromC::from_c(ud.ah);
            Some((handle?, ud.remote_qpn, ud.remote_qkey))
        }
    }
}

/// A part of an object that libibverbs and the program also write.
pub(crate) struct SharedWithC<T>(UnsafeCell<T>);

// SAFETY: the value is accessed by raw pointer only; the contract of libibverbs determines which
// thread may access which field.
unsafe impl<T> Sync for SharedWithC<T> {}
// SAFETY: the value is accessed by raw pointer only; the contract of libibverbs determines which
// thread may access which field.
unsafe impl<T> Send for SharedWithC<T> {}

impl<T> SharedWithC<T> {
    pub(crate) fn new(value: T) -> SharedWithC<T> {
        SharedWithC(UnsafeCell::new(value))
    }

    pub(crate) fn get(&self) -> *mut T {
        self.0.get()
    }

    /// The part of a new object, which no other code has yet.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.0.get_mut()
    }
}

/// Defines functions that read a field of a structure which libibverbs and the program also write.
macro_rules! fields {
    ($($shared:ty as $object:ty: $field:ident -> $ty:ty;)*) => { $(
        impl SharedWithC<$shared> {
            /// The field of this name, which the program may have changed.
            pub(crate) fn $field(&self) -> $ty {
                // SAFETY: the structure is live and begins with the object. The program does not
                // write the field during a verb.
                unsafe { (*self.get().cast::<$object>()).$field }
            }
        }
    )* };
}

fields! {
    ibv_pd as ibv_pd: handle -> u32;
    ibv_mw as ibv_mw: handle -> u32;
    verbs_cq as ibv_cq: handle -> u32;
    verbs_cq as ibv_cq: context -> *mut ibv_context;
    verbs_qp as ibv_qp: handle -> u32;
    verbs_srq as ibv_srq: handle -> u32;
    verbs_srq as ibv_srq: context -> *mut ibv_context;
}

/// An object that the program destroys. The verb frees it, or leaves it alive if it fails.
pub(crate) struct ToFree<T>(*mut T);

/// A live object from `Box::into_raw`, which the program does not use any more if the verb
/// succeeds.
impl<C, T: At<C>> FromC<*mut C> for ToFree<T> {
    unsafe fn from_c(given: *mut C) -> ToFree<T> {
        ToFree(given.cast())
    }
}

impl<T> Deref for ToFree<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: the promise of this type: the object is alive until `free`.
        unsafe { &*self.0 }
    }
}

impl<T> ToFree<T> {
    /// Frees the object, which no other part of the provider uses any more.
    pub(crate) fn free(self) {
        // SAFETY: the promise of this type, and this is the last reference.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// 0 or an errno. A refusal is reported.
impl<E: Into<Refusal>> Answer<c_int> for Result<(), E> {
    fn answer(name: &'static str, verb: impl FnOnce() -> Self) -> c_int {
        status(|| verb().map_err(|refusal| reported(name, refusal.into())))
    }
}

/// No answer to the program.
impl<E: Into<Refusal>> Answer<()> for Result<(), E> {
    fn answer(name: &'static str, verb: impl FnOnce() -> Self) {
        <Self as Answer<c_int>>::answer(name, verb);
    }
}

/// An object, which the program owns until it destroys it; or null, with `errno` set. A refusal is
/// reported.
impl<C, T: At<C>, E: Into<Refusal>> Answer<*mut C> for Result<Box<T>, E> {
    fn answer(name: &'static str, verb: impl FnOnce() -> Self) -> *mut C {
        pointer(|| verb().map_err(|refusal| reported(name, refusal.into()))).cast()
    }
}

/// The result in the form of C. Such a verb neither panics nor waits.
impl<T> Answer<T> for T {
    #[inline(always)]
    fn answer(_: &'static str, verb: impl FnOnce() -> T) -> T {
        verb()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_and_lists_are_read_at_any_address() {
        let mut memory = [0u64; 8];
        let start = memory.as_mut_ptr().cast::<u8>();
        for offset in 0..8 {
            let at = start.wrapping_add(offset).cast::<ibv_sge>();
            let sge = |addr| ibv_sge {
                addr,
                length: 1,
                lkey: 2,
            };
            // SAFETY: the memory has space for two elements after any of these offsets.
            let (first, both) = unsafe {
                at.write_unaligned(sge(7));
                at.add(1).write_unaligned(sge(9));
                let both: &[Unalign<ibv_sge>] = FromC::from_c((at.cast_const(), 2));
                (Copied::from_c(at.cast_const()), both)
            };
            assert_eq!(first.0, sge(7));
            assert_eq!(
                both.iter().map(Unalign::get).collect::<Vec<_>>(),
                [sge(7), sge(9)]
            );
        }
        // SAFETY: null, and a list without elements.
        unsafe {
            assert!(Requests::<ibv_recv_wr>::from_c(ptr::null_mut()).take().is_none());
            let none: &[Unalign<u64>] = FromC::from_c((ptr::dangling(), 0));
            assert!(none.is_empty());
        }
    }
}
