#!lua flags=allow-oom
-- Marks claimed events as finished. KEYS: one per event. ARGV: owner, '1' if the call is repeated, ttl in s, value ('d' or 'x').
-- Answers per key, separated by commas: 1, or 0 if the claim was lost to another consumer.
local owner, again, ttl, final = ARGV[1], ARGV[2] == '1', ARGV[3], ARGV[4]
local claim = 'p|' .. owner .. '|'
local length = #claim
local answers = {}
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key)
  if type(value) == 'table' and not string.find(value.err, 'WRONGTYPE', 1, true) then
    return value
  end
  local text = type(value) == 'string' and value or ''
  -- A missing key was lost by Redis, not by us: the event is finished nevertheless.
  local ours = not value or string.sub(text, 1, length) == claim
  -- Another consumer took over and failed: the event was handled here, so it needs no further attempt.
  if ours or (final == 'd' and string.sub(text, 1, 2) == 'f|') then
    redis.call('SET', key, final, 'EX', ttl)
  end
  answers[i] = (ours or (again and value == final)) and 1 or 0
end
return table.concat(answers, ',')
