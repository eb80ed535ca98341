# The targets of a Makefile that say `## what they do : VARIABLES`, and the values of those (shown: NAME=value ...).
BEGIN { n = split(shown, pairs, " "); for (i = 1; i <= n; i++) { split(pairs[i], p, "="); value[p[1]] = pairs[i] } }
/^[a-z]+:.*## / {
  target = $0; sub(/:.*/, "", target)
  text = $0; sub(/^.*## /, "", text)
  names = ""; if (text ~ / : [A-Z ]+$/) { names = text; sub(/^.* : /, "", names); sub(/ : [A-Z ]+$/, "", text) }
  printf "make %-13s%s\n", target, text
  n = split(names, each, " "); line = ""
  for (i = 1; i <= n; i++) {
    if (length(line) + length(value[each[i]]) > 80) { printf "%18s%s\n", "", line; line = "" }
    line = line value[each[i]] " "
  }
  if (line) printf "%18s%s\n", "", line
}
