//! The few things that are read from BTF: of a program's the name of a function, and what lies where
//! in a data section; of the kernel's what lies where in a structure, and names of values.
//!
//! aya-obj parses BTF but keeps its look-ups by type id to itself, and libraries that index all
//! names and types make a map of each: a node has hundreds of BTF objects (Cilium loads one with
//! every program), of each of which one name is wanted. So the types are walked once here, nothing
//! is copied, and every offset is checked.
//! Format: <https://docs.kernel.org/bpf/btf.html>.

use std::collections::BTreeMap;

const MAGIC: u16 = 0xeb9f;
/// Deeper chains of typedefs and qualifiers are no C that anybody wrote.
const DEPTH: usize = 32;

/// Kinds of types (`BTF_KIND_*`).
mod kind {
    pub const INT: u32 = 1;
    pub const ARRAY: u32 = 3;
    pub const STRUCT: u32 = 4;
    pub const UNION: u32 = 5;
    pub const ENUM: u32 = 6;
    pub const TYPEDEF: u32 = 8;
    pub const VOLATILE: u32 = 9;
    pub const CONST: u32 = 10;
    pub const RESTRICT: u32 = 11;
    pub const FUNC: u32 = 12;
    pub const FUNC_PROTO: u32 = 13;
    pub const VAR: u32 = 14;
    pub const DATASEC: u32 = 15;
    pub const DECL_TAG: u32 = 17;
    pub const TYPE_TAG: u32 = 18;
    pub const ENUM64: u32 = 19;
}

/// BTF bytes of this machine's byte order, with the place of each type.
#[derive(Debug)]
pub struct Btf<'bytes> {
    types: &'bytes [u8],
    strings: &'bytes [u8],
    /// Offset in `types` of type 1, 2, …
    starts: Vec<usize>,
}

/// `struct btf_type`.
#[derive(Debug, Clone, Copy)]
struct Type<'bytes> {
    name: u32,
    kind: u32,
    members: usize,
    /// Whether the offsets of its members tell the sizes of bit fields too.
    has_bit_fields: bool,
    /// Size in bytes, or the id of the type that this one is made of.
    extent: u32,
    /// What follows.
    rest: &'bytes [u8],
}

fn word(bytes: &[u8], offset: usize) -> Option<u32> {
    let bytes = bytes.get(offset..offset.checked_add(4)?)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

impl<'bytes> Btf<'bytes> {
    /// Finds the types; `None` if the bytes are no BTF, cut off, or hold a kind of type that this
    /// version does not know.
    #[must_use]
    pub fn new(bytes: &'bytes [u8]) -> Option<Self> {
        let magic = u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?);
        if magic != MAGIC {
            return None;
        }
        let header = word(bytes, 4)? as usize;
        let section = |offset: usize| -> Option<&'bytes [u8]> {
            let start = header.checked_add(word(bytes, offset)? as usize)?;
            bytes.get(start..start.checked_add(word(bytes, offset + 4)? as usize)?)
        };
        let mut btf = Self { types: section(8)?, strings: section(16)?, starts: Vec::new() };
        let mut at = 0;
        while at < btf.types.len() {
            let found = btf.parse(at)?;
            let extra = match found.kind {
                kind::INT | kind::VAR | kind::DECL_TAG => 4,
                kind::ARRAY => 12,
                kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => found.members * 12,
                kind::ENUM | kind::FUNC_PROTO => found.members * 8,
                // Pointers, forward declarations, typedefs, qualifiers, functions, floats, tags.
                2 | 7..=12 | 16 | kind::TYPE_TAG => 0,
                _ => return None,
            };
            btf.starts.push(at);
            at += 12 + extra;
        }
        Some(btf)
    }

    fn parse(&self, at: usize) -> Option<Type<'bytes>> {
        let info = word(self.types, at + 4)?;
        Some(Type {
            name: word(self.types, at)?,
            kind: info >> 24 & 0x1f,
            members: (info & 0xffff) as usize,
            has_bit_fields: info >> 31 != 0,
            extent: word(self.types, at + 8)?,
            rest: self.types.get(at + 12..)?,
        })
    }

    fn type_by_id(&self, id: u32) -> Option<Type<'bytes>> {
        self.parse(*self.starts.get((id as usize).checked_sub(1)?)?)
    }

    fn string(&self, offset: u32) -> Option<&'bytes str> {
        let rest = self.strings.get(offset as usize..)?;
        std::str::from_utf8(rest.split(|&byte| byte == 0).next()?).ok()
    }

    /// Name of the function with this type id.
    #[must_use]
    pub fn function(&self, id: u32) -> Option<&'bytes str> {
        let found = self.type_by_id(id).filter(|found| found.kind == kind::FUNC)?;
        self.string(found.name).filter(|name| !name.is_empty())
    }

    /// The integers in the data section with this type id, by the names of their variables.
    ///
    /// Variables that are no integers of at most 8 bytes are left out.
    #[must_use]
    pub fn integers(&self, section: u32, data: &[u8]) -> BTreeMap<String, u64> {
        let Some(found) = self.type_by_id(section).filter(|found| found.kind == kind::DATASEC)
        else {
            return BTreeMap::new();
        };
        (0..found.members)
            .filter_map(|index| {
                let at = index * 12;
                let variable = self.type_by_id(word(found.rest, at)?)?;
                let offset = word(found.rest, at + 4)? as usize;
                if variable.kind != kind::VAR {
                    return None;
                }
                let size = self.integer_size(variable.extent)?;
                let bytes = data.get(offset..offset.checked_add(size)?)?;
                let mut value = [0; 8];
                let room = if cfg!(target_endian = "big") {
                    &mut value[8 - size..]
                } else {
                    &mut value[..size]
                };
                room.copy_from_slice(bytes);
                Some((self.string(variable.name)?.to_owned(), u64::from_ne_bytes(value)))
            })
            .collect()
    }

    /// Type ids of the structures (and unions) with these names, in one walk; the first of each name.
    #[must_use]
    pub fn structures<const N: usize>(&self, names: [&str; N]) -> [Option<u32>; N] {
        let mut found = [None; N];
        let mut missing = N;
        for (index, &at) in self.starts.iter().enumerate() {
            if missing == 0 {
                break;
            }
            let Some(one) = self.parse(at) else { continue };
            if !matches!(one.kind, kind::STRUCT | kind::UNION) {
                continue;
            }
            for (slot, name) in found.iter_mut().zip(names) {
                if slot.is_none() && self.is_named(one.name, name) {
                    *slot = u32::try_from(index + 1).ok();
                    missing -= 1;
                }
            }
        }
        found
    }

    fn is_named(&self, offset: u32, name: &str) -> bool {
        let end = offset as usize + name.len();
        self.strings.get(offset as usize..end) == Some(name.as_bytes())
            && self.strings.get(end) == Some(&0)
    }

    /// Offset in bytes of a member of a structure; `path` may lead through structures in it
    /// (`nd_net.net`), and those without name are looked into. `None` if there is no such member, or
    /// it does not begin at a byte.
    #[must_use]
    pub fn offset(&self, structure: u32, path: &str) -> Option<u32> {
        let mut within = structure;
        let mut bits = 0_u32;
        for name in path.split('.') {
            let (at, member) = self.member(within, name, 0)?;
            bits = bits.checked_add(at)?;
            within = member;
        }
        bits.is_multiple_of(8).then_some(bits / 8)
    }

    /// Offset in bits and type of a member.
    fn member(&self, structure: u32, name: &str, depth: usize) -> Option<(u32, u32)> {
        if depth == DEPTH {
            return None;
        }
        let found = self.type_by_id(self.unwrapped(structure)?)?;
        if !matches!(found.kind, kind::STRUCT | kind::UNION) {
            return None;
        }
        (0..found.members).find_map(|index| {
            let at = index * 12;
            let (member, kind) = (word(found.rest, at)?, word(found.rest, at + 4)?);
            let offset = word(found.rest, at + 8)?;
            // The size of a bit field stands in the upper byte.
            let offset = if found.has_bit_fields { offset & 0xff_ffff } else { offset };
            if self.is_named(member, name) {
                return Some((offset, kind));
            }
            if self.string(member) != Some("") {
                return None;
            }
            let (inner, kind) = self.member(kind, name, depth + 1)?;
            Some((offset.checked_add(inner)?, kind))
        })
    }

    /// The type behind typedefs and qualifiers.
    fn unwrapped(&self, mut id: u32) -> Option<u32> {
        for _ in 0..DEPTH {
            let found = self.type_by_id(id)?;
            match found.kind {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    id = found.extent;
                }
                _ => return Some(id),
            }
        }
        None
    }

    /// Values and names of an enumeration; empty if there is none of this name.
    #[must_use]
    pub fn enumeration(&self, name: &str) -> BTreeMap<u32, &'bytes str> {
        let found =
            self.starts.iter().filter_map(|&at| self.parse(at)).find(|one| {
                one.kind == kind::ENUM && one.members > 0 && self.is_named(one.name, name)
            });
        let Some(found) = found else { return BTreeMap::new() };
        (0..found.members)
            .filter_map(|index| {
                let name = self.string(word(found.rest, index * 8)?)?;
                Some((word(found.rest, index * 8 + 4)?, name))
            })
            .collect()
    }

    /// Size in bytes of an integer or enumeration, through typedefs and qualifiers.
    fn integer_size(&self, mut id: u32) -> Option<usize> {
        for _ in 0..DEPTH {
            let found = self.type_by_id(id)?;
            match found.kind {
                kind::INT | kind::ENUM | kind::ENUM64 => {
                    return Some(found.extent as usize).filter(|size| (1..=8).contains(size));
                }
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    id = found.extent;
                }
                _ => return None,
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    /// 1 `u8`, 2 `const` of it, 3 `u32`, 4 a pointer, 5 and 6 and 7 variables, 8 a section of them,
    /// 9 a prototype, 10 a function.
    fn sample() -> Vec<u8> {
        let strings = b"\0u8\0u32\0eth_header_length\0limit\0pointer\0.rodata.config\0a_function\0";
        let name = |wanted: &str| {
            let at = strings.windows(wanted.len() + 1).position(|part| {
                &part[..wanted.len()] == wanted.as_bytes() && part[wanted.len()] == 0
            });
            u32::try_from(at.unwrap()).unwrap()
        };
        let kind = |kind: u32, members: u32| kind << 24 | members;
        let types = words(&[
            name("u8"),
            kind(1, 0),
            1,
            8,
            0,
            kind(10, 0),
            1,
            name("u32"),
            kind(1, 0),
            4,
            32,
            0,
            kind(2, 0),
            3,
            name("eth_header_length"),
            kind(14, 0),
            2,
            1,
            name("limit"),
            kind(14, 0),
            3,
            1,
            name("pointer"),
            kind(14, 0),
            4,
            1,
            name(".rodata.config"),
            kind(15, 3),
            16,
            5,
            0,
            1,
            6,
            4,
            4,
            7,
            8,
            8,
            0,
            kind(13, 0),
            3,
            name("a_function"),
            kind(12, 1),
            9,
        ]);
        let length = |part: &[u8]| u32::try_from(part.len()).unwrap();
        let mut bytes = 0xeb9f_u16.to_ne_bytes().to_vec();
        bytes.extend([1, 0]);
        bytes.extend(words(&[24, 0, length(&types), length(&types), length(strings)]));
        bytes.extend(types);
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn names_and_constants_are_found() {
        let bytes = sample();
        let btf = Btf::new(&bytes).unwrap();
        assert_eq!(btf.function(10), Some("a_function"));
        assert_eq!(btf.function(9), None, "a prototype is no function");
        assert_eq!(btf.function(0), None);
        assert_eq!(btf.function(11), None);
        assert_eq!(btf.structures(["a_function", "missing"]), [None, None]);
        let mut data = vec![14, 0xff, 0xff, 0xff];
        data.extend(70_000_u32.to_ne_bytes());
        data.extend([0xff; 8]);
        assert_eq!(
            btf.integers(8, &data),
            [("eth_header_length".to_owned(), 14), ("limit".to_owned(), 70_000)].into()
        );
        // Data that is shorter than the types say.
        assert_eq!(btf.integers(8, &data[..6]), [("eth_header_length".to_owned(), 14)].into());
        assert_eq!(btf.integers(10, &data), BTreeMap::new());
    }

    #[test]
    fn the_kernels_structures_are_found() {
        let bytes = std::fs::read("/sys/kernel/btf/vmlinux").expect("a kernel with BTF");
        let btf = Btf::new(&bytes).unwrap();
        let [icmp, skb, none] = btf.structures(["icmphdr", "sk_buff", "no_such_structure"]);
        let icmp = icmp.expect("icmphdr");
        // From the protocol: these cannot move.
        assert_eq!(btf.offset(icmp, "type"), Some(0));
        assert_eq!(btf.offset(icmp, "checksum"), Some(2));
        assert_eq!(btf.offset(icmp, "un.echo.sequence"), Some(6));
        assert_eq!(btf.offset(icmp, "sequence"), None, "it is in a union with a name");
        assert_eq!(btf.offset(icmp, "un.echo.sequence.more"), None);
        let skb = skb.expect("sk_buff");
        // In unions and structures without a name.
        assert!(btf.offset(skb, "dev").is_some() && btf.offset(skb, "protocol").is_some());
        assert_eq!(btf.offset(skb, "fclone"), None, "a bit field in the middle of a byte");
        assert_eq!(none, None);
        assert_eq!(btf.enumeration("tcp_ca_state").get(&4), Some(&"TCP_CA_Loss"));
        assert!(btf.enumeration("no_such_enumeration").is_empty());
    }

    #[test]
    fn damaged_bytes_are_refused_or_passed_over_without_a_panic() {
        let bytes = sample();
        assert!(Btf::new(&[]).is_none());
        for end in 0..bytes.len() {
            assert!(Btf::new(&bytes[..end]).is_none(), "cut at {end}");
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] = value;
                if let Some(btf) = Btf::new(&damaged) {
                    for id in 0..12 {
                        let _ = btf.function(id);
                        let _ = btf.structures(["u8"]);
                        let _ = btf.enumeration("u8");
                        let _ = btf.integers(id, &[0; 16]);
                        let _ = btf.offset(id, "u8.u32");
                    }
                }
            }
        }
    }
}
