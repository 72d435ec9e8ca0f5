//! XDR (RFC 4506): big-endian units of four bytes.
//!
//! [`Xdr`] encodes and decodes a type. `record!` and `words!` implement it for structs and
//! enums. Values of variable length are borrowed from the message that contains them, so a count
//! from a peer causes no allocation.

/// The reason why bytes are no value of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadXdr {
    /// The message ends within the value.
    #[error("the message is truncated")]
    Truncated,
    /// The word of an enum or union has no meaning.
    #[error("{0} is not among the values of its type")]
    Value(u32),
    /// The value has more bytes than its type permits.
    #[error("{0} bytes are too many")]
    Length(u32),
}

/// The unread rest of a message.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// Takes the next `len` bytes and skips their padding.
    ///
    /// # Errors
    /// The message ends before them.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], BadXdr> {
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(BadXdr::Truncated)?;
        self.0 = rest.get(padding(len)..).ok_or(BadXdr::Truncated)?;
        Ok(bytes)
    }
}

/// Bytes from `len` to the next multiple of four.
pub const fn padding(len: usize) -> usize {
    len.wrapping_neg() % 4
}

/// A type with an encoding.
pub trait Xdr<'a>: Sized {
    /// Decodes a value from the beginning of the message.
    ///
    /// # Errors
    /// The message contains no valid value of the type.
    fn take(reader: &mut Reader<'a>) -> Result<Self, BadXdr>;

    /// Appends the encoded value.
    fn put(&self, out: &mut Vec<u8>);
}

impl Xdr<'_> for u32 {
    fn take(reader: &mut Reader) -> Result<Self, BadXdr> {
        let (word, rest) = reader.0.split_first_chunk().ok_or(BadXdr::Truncated)?;
        reader.0 = rest;
        Ok(Self::from_be_bytes(*word))
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_be_bytes());
    }
}

impl Xdr<'_> for u64 {
    fn take(reader: &mut Reader) -> Result<Self, BadXdr> {
        let (word, rest) = reader.0.split_first_chunk().ok_or(BadXdr::Truncated)?;
        reader.0 = rest;
        Ok(Self::from_be_bytes(*word))
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_be_bytes());
    }
}

/// A verifier: eight bytes without a count.
impl Xdr<'_> for [u8; 8] {
    fn take(reader: &mut Reader) -> Result<Self, BadXdr> {
        u64::take(reader).map(u64::to_be_bytes)
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
}

impl Xdr<'_> for bool {
    fn take(reader: &mut Reader) -> Result<Self, BadXdr> {
        match u32::take(reader)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(BadXdr::Value(other)),
        }
    }

    fn put(&self, out: &mut Vec<u8>) {
        u32::from(*self).put(out);
    }
}

impl Xdr<'_> for () {
    fn take(_reader: &mut Reader) -> Result<Self, BadXdr> {
        Ok(())
    }

    fn put(&self, _out: &mut Vec<u8>) {}
}

/// A counted opaque or string.
impl<'a> Xdr<'a> for &'a [u8] {
    fn take(reader: &mut Reader<'a>) -> Result<Self, BadXdr> {
        let len = u32::take(reader)?;
        reader.bytes(len as usize)
    }

    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        out.extend_from_slice(self);
        out.resize(out.len() + padding(self.len()), 0);
    }
}

/// Optional-data: a flag, and the value if the flag is set.
impl<'a, T: Xdr<'a>> Xdr<'a> for Option<T> {
    fn take(reader: &mut Reader<'a>) -> Result<Self, BadXdr> {
        bool::take(reader)?.then(|| T::take(reader)).transpose()
    }

    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }
}

impl<'a, A: Xdr<'a>, B: Xdr<'a>> Xdr<'a> for (A, B) {
    fn take(reader: &mut Reader<'a>) -> Result<Self, BadXdr> {
        Ok((A::take(reader)?, B::take(reader)?))
    }

    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }
}

/// Defines structs whose encoding is that of their fields in order.
macro_rules! record {
    ($($(#[$meta:meta])* pub struct $name:ident $(<$life:lifetime>)? {
        $($(#[$of_field:meta])* pub $field:ident: $type:ty,)+
    })+) => { $(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name $(<$life>)? { $($(#[$of_field])* pub $field: $type,)+ }
        crate::xdr::record!(@both $name [$($life)?] $($field: $type,)+);
    )+ };
    (@both $name:ident [] $($field:ident: $type:ty,)+) => {
        impl<'a> crate::xdr::Xdr<'a> for $name {
            crate::xdr::record!(@body 'a $($field: $type,)+);
        }
    };
    (@both $name:ident [$life:lifetime] $($field:ident: $type:ty,)+) => {
        impl<$life> crate::xdr::Xdr<$life> for $name<$life> {
            crate::xdr::record!(@body $life $($field: $type,)+);
        }
    };
    (@body $life:lifetime $($field:ident: $type:ty,)+) => {
        fn take(reader: &mut crate::xdr::Reader<$life>) -> Result<Self, crate::xdr::BadXdr> {
            Ok(Self { $($field: <$type as crate::xdr::Xdr>::take(reader)?,)+ })
        }

        fn put(&self, out: &mut Vec<u8>) {
            $(self.$field.put(out);)+
        }
    };
}

/// Defines enums whose encoding is a word.
macro_rules! words {
    ($($(#[$meta:meta])* pub enum $name:ident { $($(#[$of_value:meta])* $value:ident = $word:literal,)+ })+) => { $(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum $name { $($(#[$of_value])* $value = $word,)+ }

        impl $name {
            /// All values of the enum.
            pub const ALL: &[Self] = &[$(Self::$value,)+];

            /// The value that this word encodes.
            pub const fn of(word: u32) -> Option<Self> {
                match word {
                    $($word => Some(Self::$value),)+
                    _ => None,
                }
            }
        }

        impl crate::xdr::Xdr<'_> for $name {
            fn take(reader: &mut crate::xdr::Reader) -> Result<Self, crate::xdr::BadXdr> {
                let word = u32::take(reader)?;
                Self::of(word).ok_or(crate::xdr::BadXdr::Value(word))
            }

            fn put(&self, out: &mut Vec<u8>) {
                (*self as u32).put(out);
            }
        }
    )+ };
}

pub(crate) use {record, words};
