// Texts as words of a shell.

const PLAIN = /^[\w@%+=:,./-]+$/;

export const quoted = (text) => (PLAIN.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

// The option by which curl sends the token, if one is needed. The page never shows the token itself.
export const tokenOption = (isNeeded) => (isNeeded ? ' -H "Authorization: Bearer $BALANCE_TOKEN"' : "");
