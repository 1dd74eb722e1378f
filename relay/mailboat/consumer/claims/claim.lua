-- Claims events. KEYS: one per event. ARGV: owner, repeated ('1' or '0', not needed here), lease in ms,
-- ttl in s, then nothing, or per key '1' for a replay, else '0'.
-- Answers per key, separated by commas: m<attempt>:<deaths> it is ours; w<ms> wait; d done; x dead.
local owner, lease, ttl = ARGV[1], tonumber(ARGV[3]), ARGV[4]
local instance, incarnation = string.match(owner, '^(.*):([^:]*)$')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- The same container in a later life: the process that holds the claim is gone.
local function succeeds(holder)
  local former, life = string.match(holder, '^(.*):([^:]*)$')
  return former == instance and life < incarnation
end

local answers = {}
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key)
  local attempt, deaths, answer = 1, 0, nil
  if value then
    local state, holder, at, tries, died
    if type(value) == 'string' then
      state, holder, at, tries, died = string.match(value, '^([pf])|([^|]*)|(%d+)|(%d+)|?(%d*)$')
      at, tries, died = tonumber(at), tonumber(tries), tonumber(died) or 0
    end
    if state == 'p' and holder == owner then -- the reply to an earlier claim was lost
      attempt, deaths = tries, died
    elseif state == 'p' and at > now and not succeeds(holder) then
      answer = 'w' .. (at - now)
    elseif state == 'p' then
      attempt, deaths = tries + 1, died + 1
    elseif state == 'f' and at > now then
      answer = 'w' .. (at - now)
    elseif state == 'f' then
      attempt, deaths = tries + 1, died
    elseif value == 'x' then
      answer = ARGV[4 + i] ~= '1' and 'x' or nil
    else -- 'd', and every value of an older helper
      answer = 'd'
    end
  end
  if not answer then
    local history = attempt .. (deaths > 0 and '|' .. deaths or '')
    redis.call('SET', key, 'p|' .. owner .. '|' .. (now + lease) .. '|' .. history, 'EX', ttl)
    answer = 'm' .. attempt .. ':' .. deaths
  end
  answers[i] = answer
end
return table.concat(answers, ',')
