//! Takes out of an object file what debuggers alone read. Compiler and linker need it for the BTF; in
//! the file it is nine tenths, which every start would go over.

/// Sizes of ELF's file header and section headers, 64 bits.
const FILE_HEADER: usize = 64;
const SECTION_HEADER: usize = 64;

/// The file without the contents of its `.debug_` sections. Their headers stay, empty, so that
/// sections keep their numbers.
///
/// # Errors
/// One sentence, if it is no ELF file of 64 bits and this byte order.
pub fn strip(file: &[u8]) -> Result<Vec<u8>, String> {
    stripped(file).ok_or_else(|| "the object file of the eBPF programs is no ELF file".to_owned())
}

fn stripped(file: &[u8]) -> Option<Vec<u8>> {
    const CLASS_64: u8 = 2;
    const ORDER: u8 = if cfg!(target_endian = "big") { 2 } else { 1 };
    if file.get(..6)? != [0x7f, b'E', b'L', b'F', CLASS_64, ORDER] {
        return None;
    }
    let short = |at: usize| Some(u16::from_ne_bytes(file.get(at..at + 2)?.try_into().ok()?));
    let table = long(file, 40)?;
    if usize::from(short(58)?) != SECTION_HEADER {
        return None;
    }
    let count = usize::from(short(60)?);
    let mut headers = file.get(table..table.checked_add(count * SECTION_HEADER)?)?.to_vec();
    let names = headers.chunks(SECTION_HEADER).nth(short(62)?.into())?;
    let names = file.get(long(names, 24)?..)?.get(..long(names, 32)?)?;

    let mut out = file.get(..FILE_HEADER)?.to_vec();
    for header in headers.chunks_mut(SECTION_HEADER) {
        const NOTHING: u32 = 0;
        const NO_BITS: u32 = 8;
        let name = u32::from_ne_bytes(header[..4].try_into().ok()?);
        let name = names.get(usize::try_from(name).ok()?..)?.split(|byte| *byte == 0).next()?;
        let kind = u32::from_ne_bytes(header[4..8].try_into().ok()?);
        if name.starts_with(b".debug_") || name.starts_with(b".rel.debug_") {
            // All but the name.
            header[4..].fill(0);
        } else if kind != NOTHING && kind != NO_BITS {
            let data = file.get(long(header, 24)?..)?.get(..long(header, 32)?)?;
            out.resize(out.len().next_multiple_of(16), 0);
            header[24..32].copy_from_slice(&u64::try_from(out.len()).ok()?.to_ne_bytes());
            out.extend(data);
        }
    }
    out.resize(out.len().next_multiple_of(16), 0);
    let table = u64::try_from(out.len()).ok()?.to_ne_bytes();
    out.get_mut(40..48)?.copy_from_slice(&table);
    out.extend(headers);
    Some(out)
}

/// A number of eight bytes.
fn long(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..at + 8)?.try_into().ok()?;
    usize::try_from(u64::from_ne_bytes(bytes)).ok()
}
